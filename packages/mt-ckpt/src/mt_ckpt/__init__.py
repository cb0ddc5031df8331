"""Checkpoints as folders of Zarr arrays that any layout can read."""

__all__: list[str] = []
