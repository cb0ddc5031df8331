"""The training step, its schedule and its evaluation."""
