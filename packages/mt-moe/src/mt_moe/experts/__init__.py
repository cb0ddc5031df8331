"""Experts: feed-forwards whose weights are one array, and the kernels that multiply them."""
