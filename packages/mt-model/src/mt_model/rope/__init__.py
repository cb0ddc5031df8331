"""Rotary embeddings, and what else depends on the positions of tokens."""
