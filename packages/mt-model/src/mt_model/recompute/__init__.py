"""Which activations backward computes again, and which wait in the host's memory."""
