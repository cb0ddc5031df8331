"""Train transformer models: one YAML from a laptop to a cluster."""

__all__: list[str] = []
