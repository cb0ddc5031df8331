"""Pipeline schedules as values: generate, check and run them."""

__all__: list[str] = []
