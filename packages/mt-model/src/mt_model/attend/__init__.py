"""Attention of queries to keys: who attends to whom, masks, kernels and the cache."""
