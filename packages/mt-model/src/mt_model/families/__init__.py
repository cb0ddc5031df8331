"""Model families of Hugging Face transformers, one module each."""
