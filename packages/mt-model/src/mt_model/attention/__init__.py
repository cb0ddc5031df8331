"""Mixers with softmax attention, each with its config."""
