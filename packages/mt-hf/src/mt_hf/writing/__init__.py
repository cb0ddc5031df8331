"""Folders of Hugging Face transformers, written."""
