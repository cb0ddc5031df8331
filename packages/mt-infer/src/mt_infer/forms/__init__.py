"""The bodies that clients send to a server: each form is a dataclass of its fields."""
