"""Tensor and sequence parallel layers that take a process group."""

__all__: list[str] = []
