"""Run tests over many ranks on one CPU machine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mt_testing.errors import PoolError, RankDied, RankFailure, RankTimeout
    from mt_testing.pool import RankPool

__all__ = ["PoolError", "RankDied", "RankFailure", "RankPool", "RankTimeout"]

# Names are resolved on first use: pytest imports this package in every session, for its plugin.
_HOMES = {
    "PoolError": "errors",
    "RankDied": "errors",
    "RankFailure": "errors",
    "RankPool": "pool",
    "RankTimeout": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mt_testing' has no attribute {name!r}")
    return getattr(import_module(f"mt_testing.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
