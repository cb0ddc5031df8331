"""Number formats, and tensors in them."""
