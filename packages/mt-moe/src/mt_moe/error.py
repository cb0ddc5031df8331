"""What routing can raise."""

from __future__ import annotations


class RoutingError(ValueError):
    """Tokens can't be sent: a router made NaN, or ranks of a group differ in their experts."""
