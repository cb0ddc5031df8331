"""The YAML file of a run: its sections, and the checks between them."""
