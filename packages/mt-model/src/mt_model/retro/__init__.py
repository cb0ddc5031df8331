"""Retrieval: attention to the encoded neighbours of a text's chunks."""
