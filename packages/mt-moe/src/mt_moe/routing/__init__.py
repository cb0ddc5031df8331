"""Routers: which experts serve a token, with what weights, and how their load is balanced."""
