"""Families of models that read images, one module each."""
