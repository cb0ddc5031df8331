"""A server's tasks for an engine: prompts as tokens, and parameters of their continuations."""
