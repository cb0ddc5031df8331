"""Load for servers with OpenAI's interface, and what they make of it."""
