"""Linear layers in low precision, and their products."""
