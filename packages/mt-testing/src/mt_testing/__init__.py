"""Run tests over many ranks on one CPU machine."""

__all__: list[str] = []
