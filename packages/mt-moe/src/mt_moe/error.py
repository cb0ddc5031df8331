"""The error of routing."""

from __future__ import annotations


class RoutingError(ValueError):
    """Tokens can't be sent: a router's weights are not finite, or ranks of a group disagree."""
