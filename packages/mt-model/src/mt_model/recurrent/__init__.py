"""Mixers with a recurrent state, each with its config."""
