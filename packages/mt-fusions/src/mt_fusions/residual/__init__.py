"""The residual stream: a branch with its dropout is added."""
