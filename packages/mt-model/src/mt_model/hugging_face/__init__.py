"""Weights and configurations in the folders of Hugging Face transformers."""
