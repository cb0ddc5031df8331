"""The parameters of an optimizer: groups, overrides, and which of them are matrices."""
