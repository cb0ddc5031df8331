"""Generation with a cache: CUDA graphs, and the scales of low-precision caches."""
