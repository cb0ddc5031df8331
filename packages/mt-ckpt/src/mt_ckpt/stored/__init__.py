"""Stored objects of a step directory, chunks and packs: how they are made, committed and read."""
