"""Generation from a cache: CUDA graphs, and scales of low-precision caches."""
