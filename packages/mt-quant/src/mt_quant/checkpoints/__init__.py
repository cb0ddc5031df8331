"""Quantised layers as checkpoints of other software store them."""
