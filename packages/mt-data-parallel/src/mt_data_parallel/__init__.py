"""Bucketed gradient reduction that overlaps with backward."""

__all__: list[str] = []
