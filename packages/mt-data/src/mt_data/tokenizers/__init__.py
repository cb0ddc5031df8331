"""Text to token ids and back, in one process or several."""
