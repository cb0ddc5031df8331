"""A whole run: start, checkpoints and end."""
