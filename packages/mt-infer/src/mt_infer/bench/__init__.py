"""Load for servers with OpenAI's interface, and measurement of their answers."""
