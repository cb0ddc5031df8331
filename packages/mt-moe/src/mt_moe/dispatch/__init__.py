"""Dispatchers: how tokens get to the ranks of their experts, and results back."""
