"""What the ranks of an engine agree on: seeds, times, and whether a mode serves."""

from __future__ import annotations

import secrets
import time

import torch
import torch.distributed as dist
from mt_parallel_state import ParallelState

_WORLD = "tp-cp-dp-pp"


class Ranks:
    """The ranks that make the same calls of an engine.

    Args:
        state: This rank's place in the layout; None for a rank alone.
    """

    def __init__(self, state: ParallelState | None) -> None:
        self._group = None if state is None else state.group(_WORLD)
        self._device = None if state is None else state.device

    def seed(self) -> int:
        """Return a new seed, the first rank's; a broadcast."""
        return int(self._first(secrets.randbits(32)))

    def time(self) -> float:
        """Return the first rank's time, so that deadlines pass in one step; a broadcast."""
        return self._first(time.monotonic())

    def any(self, problem: str | None) -> str | None:
        """Return a rank's problem, or that another rank has it; an all-reduce (MAX)."""
        if self._group is None:
            return problem
        found = torch.tensor(problem is not None, device=self._device).int()
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return problem or ("another rank refuses it" if found else None)

    def _first(self, value: float) -> float:
        """Return the first rank's value of up to 53 bits."""
        if self._group is None:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.broadcast(shared, group=self._group, group_src=0)
        return shared.item()
