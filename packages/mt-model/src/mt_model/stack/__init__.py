"""Layers in order, and one pipeline stage of them."""
