"""Writing of folders of Hugging Face transformers."""
