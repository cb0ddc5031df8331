"""How much memory activations take."""
