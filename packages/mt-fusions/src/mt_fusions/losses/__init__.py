"""Cross entropy of logits, whole or made in blocks."""
