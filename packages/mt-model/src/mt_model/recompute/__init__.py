"""Recomputation of activations in backward, and offloading to the host's memory."""
