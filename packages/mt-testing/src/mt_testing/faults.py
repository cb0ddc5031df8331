"""Fault injection: kill a rank at a named point."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mt_testing.errors import RankDied, RankFailure
from mt_testing.protocol import NOTES_VARIABLE

if TYPE_CHECKING:
    from mt_testing.pool import RankPool


class KillAt:
    """A callback that kills its own process with SIGKILL at a named point.

    The code under test takes `on_event: Callable[[str], None] | None` and calls it with the names
    of the points that it passes. It can be killed at any of them, as by a lost node or the
    out-of-memory killer: no clean-up runs.

    Args:
        point: The name of the point.
        rank: The rank to kill. A process takes its own rank from `torch.distributed`, else from the
            variable RANK, else it is 0.
        nth: Number of the fatal visit to the point, counted from 1 in each call of a pool.

    Example:
        >>> save_checkpoint(root, 20, shards, {}, on_event=KillAt("before_commit", rank=1))
    """

    def __init__(self, point: str, *, rank: int = 0, nth: int = 1) -> None:
        if not isinstance(point, str):
            raise TypeError(f"point must be a string, got {point!r}")
        if type(rank) is not int or type(nth) is not int:
            raise TypeError(f"rank and nth must be ints, got {rank!r} and {nth!r}")
        if not point:
            raise ValueError("point is empty; give the name that the code under test announces")
        if rank < 0 or nth < 1:
            raise ValueError(f"rank is {rank} and nth is {nth}; rank must be >= 0 and nth >= 1")
        self.point = point
        self.rank = rank
        self.nth = nth
        self.visits: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"KillAt({self.point!r}, rank={self.rank}, nth={self.nth})"

    def __call__(self, name: str) -> None:
        """Count a visit of the point `name`; the fatal visit does not return."""
        self.visits[name] = self.visits.get(name, 0) + 1
        if name == self.point and self.visits[name] == self.nth and _rank() == self.rank:
            _leave_note(name)
            os.kill(os.getpid(), signal.SIGKILL)


def expect_kill(
    ranks: RankPool,
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    kill: KillAt,
    timeout: float = 60.0,
) -> RankDied:
    """Run `fn(*args, on_event=kill)` on `world_size` ranks, and return the pool's error.

    Raises:
        AssertionError: The rank was not killed, or something else failed first. The message lists
            the points that the rank visited.
    """
    if kill.rank >= world_size:
        raise ValueError(f"{kill!r} names a rank outside the world of {world_size}")

    def body() -> dict[str, int]:
        fn(*args, on_event=kill)
        return kill.visits

    try:
        visits = ranks(world_size, body, timeout=timeout)[kill.rank]
    except RankDied as death:
        if death.point == kill.point and death.rank == kill.rank:
            return death
        raise AssertionError(f"{kill!r} did not end the rank; instead: {death}") from death
    except RankFailure as failure:
        raise AssertionError(f"{kill!r} did not end the rank; instead: {failure}") from failure
    raise AssertionError(
        f"{kill!r} did not end the rank: rank {kill.rank} finished after visiting {visits}"
    )


def _rank() -> int:
    torch = sys.modules.get("torch")
    if (
        torch is not None
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
    ):
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def _leave_note(point: str) -> None:
    """Announce the kill to the pool or, outside a pool, on stderr."""
    descriptor = int(os.environ.get(NOTES_VARIABLE, "2"))
    os.write(descriptor, f"KillAt {point}\n".encode())
