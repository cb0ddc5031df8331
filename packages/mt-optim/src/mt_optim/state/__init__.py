"""The state of an optimizer: precision, place, names, and the update that goes through it."""
