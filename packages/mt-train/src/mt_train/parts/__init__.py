"""Features of a training step, each behind the protocol of `part.py`."""
