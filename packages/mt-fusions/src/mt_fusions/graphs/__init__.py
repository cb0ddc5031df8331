"""Callables as CUDA graphs, and their stand-in on a CPU."""
