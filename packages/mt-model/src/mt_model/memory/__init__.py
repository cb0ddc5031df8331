"""Memory of activations."""
