"""Encoders of images, and images among the tokens of a language model."""
