"""Reading of folders of Hugging Face transformers."""
