"""Kinds of rows: one file for each, with all that a run asks of its kind."""
