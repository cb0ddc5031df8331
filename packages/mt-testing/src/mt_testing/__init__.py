"""Run tests over many ranks on one machine; see `RankPool` and the pytest fixture `ranks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

if TYPE_CHECKING:
    from mt_testing.benchmark import (
        environment,
        quartiles,
        ratios,
        shown,
        take_turns,
        write_report,
    )
    from mt_testing.calls import Call, recorded_ranks, replay
    from mt_testing.covering import pairwise
    from mt_testing.device_work import DeviceWork
    from mt_testing.errors import CommunicationError, RankDied, RankFailure, RankTimeout
    from mt_testing.fake import fake_world
    from mt_testing.faults import KillAt, expect_kill
    from mt_testing.pool import RankPool
    from mt_testing.programs import Programs
    from mt_testing.sampling import sample
    from mt_testing.strategies import layouts
    from mt_testing.syncs import HostSyncs
    from mt_testing.tolerances import assert_close, tolerance

__all__ = [
    "Call",
    "CommunicationError",
    "DeviceWork",
    "HostSyncs",
    "KillAt",
    "Programs",
    "RankDied",
    "RankFailure",
    "RankPool",
    "RankTimeout",
    "assert_close",
    "environment",
    "expect_kill",
    "fake_world",
    "layouts",
    "pairwise",
    "quartiles",
    "ratios",
    "recorded_ranks",
    "replay",
    "sample",
    "shown",
    "take_turns",
    "tolerance",
    "write_report",
]

# Names are resolved on first use: pytest imports this package in every session, for its plugin,
# and must not pay for torch there.
__getattr__ = resolve_later(__name__)


def __dir__() -> list[str]:
    return sorted(__all__)
