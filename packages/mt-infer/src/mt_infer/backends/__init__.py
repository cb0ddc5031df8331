"""Engines of a server: in its process, in other processes, and several together."""
