"""Errors of calls on ranks."""

from __future__ import annotations

import signal
from collections.abc import Mapping


class PoolError(RuntimeError):
    """The pool itself failed: its fork server did not start, or died."""


class RankFailure(Exception):  # noqa: N818 - a rank failed; not this process
    """A rank raised. The message has its number and traceback, and lists the other ranks.

    Attributes:
        rank: The rank that failed first.
        world_size: Number of ranks of the call.
        error_type: Name of the exception class raised on that rank, or "" if it did not raise.
        tracebacks: Traceback of every rank that raised before the call ended.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        world_size: int,
        error_type: str = "",
        tracebacks: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.world_size = world_size
        self.error_type = error_type
        self.tracebacks = dict(tracebacks or {})


class RankDied(RankFailure):
    """A rank's process ended before it returned.

    Attributes:
        signal_name: Name of the signal, such as "SIGKILL"; None if the process exited by itself.
        exit_code: The exit code; None if a signal ended the process.
        point: The point at which a `KillAt` ended the process; None if none did.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        world_size: int,
        status: int,
        point: str | None = None,
        tracebacks: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message, rank=rank, world_size=world_size, tracebacks=tracebacks)
        self.signal_name = signal_name(-status) if status < 0 else None
        self.exit_code = None if status < 0 else status
        self.point = point


class RankTimeout(RankFailure):
    """Ranks were still running at the end of the call's time limit.

    Attributes:
        running: The ranks that had not returned.
        stacks: The stacks of all threads of each of these ranks.
    """

    def __init__(self, message: str, *, world_size: int, stacks: Mapping[int, str]) -> None:
        super().__init__(message, rank=min(stacks), world_size=world_size)
        self.running = tuple(sorted(stacks))
        self.stacks = dict(stacks)


class CommunicationError(AssertionError):
    """Recorded calls of several ranks deadlock or disagree."""


def signal_name(number: int) -> str:
    """Return the name of a signal, such as "SIGKILL"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
