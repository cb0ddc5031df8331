"""Training with the rounding that a model will have."""
