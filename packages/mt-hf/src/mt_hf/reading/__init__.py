"""Folders of Hugging Face transformers, read."""
