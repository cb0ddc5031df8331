"""The engine as a server of OpenAI's interface."""
