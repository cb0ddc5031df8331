"""Checkpoints from and to other formats."""
