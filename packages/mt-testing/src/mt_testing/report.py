"""The outcome of a call on all its ranks, and the error that reports it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mt_testing.errors import RankDied, RankFailure, RankTimeout, signal_name

MAX_STACKS = 8  # stacks printed in full; RankTimeout.stacks has all of them
MAX_STACK_LINES = 40
_OWN_FRAME = re.compile(r'mt_testing/(worker|forkserver)\.py"|File "<string>", line 1 in <module>')
_KILL_NOTE = re.compile(r"^KillAt (\S.*)$", re.MULTILINE)


@dataclass(kw_only=True)
class Outcome:
    """The answers of the ranks, in the order in which they came."""

    world_size: int
    results: dict[int, bytes] = field(default_factory=dict)
    errors: dict[int, tuple[str, str, str]] = field(default_factory=dict)
    deaths: dict[int, int] = field(default_factory=dict)

    @property
    def running(self) -> set[int]:
        """Living ranks without an answer."""
        return set(range(self.world_size)) - set(self.results) - set(self.errors) - set(self.deaths)

    @property
    def has_failed(self) -> bool:
        """Whether any rank raised or died."""
        return bool(self.errors or self.deaths)

    @property
    def is_settled(self) -> bool:
        """Whether every rank answered and waits for the next call."""
        return not self.running and not self.deaths

    def answered(self, rank: int, answer: tuple[str, ...]) -> None:
        """Record `("ok", result)` or `("error", type, summary, traceback)`."""
        if answer[0] == "ok":
            self.results[rank] = answer[1]  # type: ignore[assignment]
        else:
            self.errors[rank] = (answer[1], answer[2], answer[3])

    def died(self, rank: int, status: int) -> None:
        """Record that a rank's process ended: an exit code, or minus a signal's number."""
        if rank in self.running:
            self.deaths[rank] = status

    def failure(self, notes: Mapping[int, str]) -> RankFailure:
        """Return the error of a failed call.

        A death comes first: the failures of its peers are only consequences, even if their reports
        arrive earlier.
        """
        tracebacks = {rank: text for rank, (_, _, text) in self.errors.items()}
        if self.deaths:
            rank, status = next(iter(self.deaths.items()))
            points = _KILL_NOTE.findall(notes.get(rank, ""))
            point = points[-1] if points else None
            message = f"rank {rank} of {self.world_size} {_ended(status)}"
            if point is not None:
                message += f" at point {point!r} (KillAt)"
            return RankDied(
                message + self._others(rank) + _stack(notes.get(rank, "")),
                rank=rank,
                world_size=self.world_size,
                status=status,
                point=point,
                tracebacks=tracebacks,
            )
        rank, (error_type, summary, text) = next(iter(self.errors.items()))
        return RankFailure(
            f"rank {rank} of {self.world_size} raised {summary}{self._others(rank)}\n\n"
            f"traceback of rank {rank}:\n{text.rstrip()}",
            rank=rank,
            world_size=self.world_size,
            error_type=error_type,
            tracebacks=tracebacks,
        )

    def timed_out(self, timeout: float, stacks: Mapping[int, str]) -> RankTimeout:
        """Return the error of a call that exceeded its time limit."""
        parts = [
            f"{_ranks(stacks)} of {self.world_size} still running after {timeout:g} s; "
            f"returned: {_ranks(self.results)}"
        ]
        places: dict[str, list[int]] = {}
        for rank in sorted(stacks):
            places.setdefault(stacks[rank] or "(no stack was written)", []).append(rank)
        for stack, ranks in list(places.items())[:MAX_STACKS]:
            parts.append(f"{_ranks(ranks)} in:\n{stack}")
        if len(places) > MAX_STACKS:
            parts.append(f"({len(places) - MAX_STACKS} more in `RankTimeout.stacks`)")
        return RankTimeout("\n\n".join(parts), world_size=self.world_size, stacks=stacks)

    def _others(self, first: int) -> str:
        """List the other ranks, one line for each different fate."""
        fates: dict[str, list[int]] = {}
        for rank, status in self.deaths.items():
            fates.setdefault(_ended(status), []).append(rank)
        for rank, (_, summary, _) in self.errors.items():
            fates.setdefault(f"raised {summary.splitlines()[0]}", []).append(rank)
        for rank in self.running:
            fates.setdefault("still running when the pool was ended", []).append(rank)
        lines = []
        for fate, ranks in fates.items():
            others = [rank for rank in ranks if rank != first]
            if others:
                lines.append(f"\n  {_ranks(others)}: {fate}")
        return "".join(lines)


def trim_stack(text: str) -> str:
    """Shorten a stack written by faulthandler, and drop the frames below the test's function."""
    lines = [line for line in text.strip().splitlines() if not _OWN_FRAME.search(line)]
    if len(lines) > MAX_STACK_LINES:
        lines = [*lines[:MAX_STACK_LINES], f"... {len(lines) - MAX_STACK_LINES} more lines"]
    return "\n".join(lines)


def _stack(notes: str) -> str:
    """Return the stack that faulthandler wrote at a fatal signal such as SIGSEGV."""
    start = notes.find("Fatal Python error")
    return f"\n\n{trim_stack(notes[start:])}" if start >= 0 else ""


def _ended(status: int) -> str:
    if status < 0:
        return f"was ended by {signal_name(-status)}"
    return f"exited with code {status} before it returned"


def _ranks(ranks: Mapping[int, object] | list[int]) -> str:
    if not ranks:
        return "no rank"
    numbers = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
