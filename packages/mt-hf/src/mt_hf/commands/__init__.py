"""The commands of `mt-hf`."""
