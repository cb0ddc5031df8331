"""Rank layouts, named process groups and parameter sharding records."""

__all__: list[str] = []
