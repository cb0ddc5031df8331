"""Run tests over many ranks on one machine; see `RankPool` and the pytest fixture `ranks`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mt_testing.covering import pairwise
    from mt_testing.errors import PoolError, RankDied, RankFailure, RankTimeout
    from mt_testing.fake import fake_world
    from mt_testing.faults import KillAt, expect_kill
    from mt_testing.pool import RankPool
    from mt_testing.strategies import layouts
    from mt_testing.tolerances import FACTORS, assert_close, tolerance

__all__ = [
    "FACTORS",
    "KillAt",
    "PoolError",
    "RankDied",
    "RankFailure",
    "RankPool",
    "RankTimeout",
    "assert_close",
    "expect_kill",
    "fake_world",
    "layouts",
    "pairwise",
    "tolerance",
]

# Names are resolved on first use: pytest imports this package in every session, for its plugin,
# and must not pay for torch there.
_HOMES = {
    "FACTORS": "tolerances",
    "KillAt": "faults",
    "PoolError": "errors",
    "RankDied": "errors",
    "RankFailure": "errors",
    "RankPool": "pool",
    "RankTimeout": "errors",
    "assert_close": "tolerances",
    "expect_kill": "faults",
    "fake_world": "fake",
    "layouts": "strategies",
    "pairwise": "covering",
    "tolerance": "tolerances",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
