"""Conversations in a terminal, with a model in this process or on a server."""
