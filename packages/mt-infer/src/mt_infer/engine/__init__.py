"""The engine: many requests at once over pages of keys and values."""
