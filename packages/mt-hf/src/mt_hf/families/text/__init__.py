"""Families of models of text, one module each."""
