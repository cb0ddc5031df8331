"""Norms, with or without the addition of a residual before them."""
