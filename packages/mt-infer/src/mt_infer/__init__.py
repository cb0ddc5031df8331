"""Generate text from a trained run."""

__all__: list[str] = []
