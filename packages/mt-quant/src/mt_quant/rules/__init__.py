"""Rules that choose a format and a method for each layer."""
