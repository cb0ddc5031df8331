"""Engines as a server uses them: in its process, in others, and several together."""
