"""The files of a token dataset: written, checked and read."""
