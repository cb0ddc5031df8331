"""Run tests over many ranks on one machine; see `RankPool` and the pytest fixture `ranks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

if TYPE_CHECKING:
    from mt_testing.benchmark import environment as environment
    from mt_testing.benchmark import quartiles as quartiles
    from mt_testing.benchmark import ratios as ratios
    from mt_testing.benchmark import shown as shown
    from mt_testing.benchmark import take_turns as take_turns
    from mt_testing.benchmark import write_report as write_report
    from mt_testing.calls import Call as Call
    from mt_testing.calls import recorded_ranks as recorded_ranks
    from mt_testing.calls import replay as replay
    from mt_testing.covering import pairwise as pairwise
    from mt_testing.device_work import DeviceWork as DeviceWork
    from mt_testing.errors import CommunicationError as CommunicationError
    from mt_testing.errors import RankDied as RankDied
    from mt_testing.errors import RankFailure as RankFailure
    from mt_testing.errors import RankTimeout as RankTimeout
    from mt_testing.fake import fake_world as fake_world
    from mt_testing.faults import KillAt as KillAt
    from mt_testing.faults import expect_kill as expect_kill
    from mt_testing.pool import RankPool as RankPool
    from mt_testing.programs import Programs as Programs
    from mt_testing.sampling import sample as sample
    from mt_testing.stores import UnsteadyStore as UnsteadyStore
    from mt_testing.stores import unsteady_store as unsteady_store
    from mt_testing.strategies import layouts as layouts
    from mt_testing.syncs import HostSyncs as HostSyncs
else:
    # Names are resolved on first use: pytest imports this package in every session, for its plugin,
    # and must not pay for torch there.
    __getattr__ = resolve_later(__name__)


def __dir__() -> list[str]:
    return resolve_later(__name__)("__all__")
