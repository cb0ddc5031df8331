"""Triton kernels; imported where they run."""
