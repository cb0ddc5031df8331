"""What a server asks of an engine: the prompts of requests as tokens, and how to continue them."""
