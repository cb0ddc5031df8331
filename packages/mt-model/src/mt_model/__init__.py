"""Transformer models as a typed list of layers."""

__all__: list[str] = []
