"""Rows for training and evaluation, and the batches made of them."""
