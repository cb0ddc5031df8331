"""Check mode: the ranks of a group compare each call before it starts.

gloo and NCCL do not compare calls. Ranks that disagree on an operation, a shape or the order of two
calls get wrong numbers, or wait for each other until a timeout that names nobody. In check mode
every call on a group is announced in a key-value store, and starts once all ranks have announced
the same call.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from mt_files import UserError, check_type

_FAILED = "failed"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.01
Announcement = dict[str, Any]


class CollectiveError(UserError, RuntimeError):
    """Ranks of a group made different calls, or a rank made none; every rank raises this."""


@dataclass(frozen=True, kw_only=True)
class CheckMode:
    """Settings of check mode, in which ranks compare their calls.

    Attributes:
        timeout: Seconds for which a rank waits for the others to announce the same call. It must be
            longer than the time by which ranks legitimately drift apart.
    """

    timeout: float = 60.0

    def __post_init__(self) -> None:
        check_type("timeout", self.timeout, int, float)
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout} must be above 0 seconds")


class Ledger:
    """The announcements of calls by the ranks of one world.

    Args:
        store: A store that all ranks reach, with keys for this ledger alone.
        rank: This process's global rank.
        mode: Settings of check mode.
    """

    def __init__(self, store: dist.Store, rank: int, mode: CheckMode) -> None:
        self.rank = rank
        self._store, self._timeout = store, mode.timeout

    def agree(self, key: str, ranks: Sequence[int], own: Announcement) -> dict[int, Announcement]:
        """Announce a call and wait for all of `ranks`.

        Returns:
            Each rank's announcement under `key`.

        Raises:
            CollectiveError: A rank did not come in time, or another rank found a difference.
        """
        self.announce(f"{key}/{self.rank}", own)
        found = self._collect({rank: f"{key}/{rank}" for rank in ranks}, own)
        # All ranks are at this call, so all have read the previous announcement: delete ours.
        name, _, number = key.rpartition("/")
        if int(number) > 0:
            self._store.delete_key(f"{name}/{int(number) - 1}/{self.rank}")
        return found

    def announce(self, key: str, own: Announcement) -> None:
        """Announce this rank's next call, without waiting."""
        self._store.set(key, json.dumps(own))
        self._store.set(f"last/{self.rank}", json.dumps(own))

    def peek(self, key: str) -> Announcement | None:
        """Return the announcement under `key`, or None."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def meet(self, peer: int, key: str, own: Announcement) -> Announcement:
        """Wait for another rank's announcement under `key`, which only this rank reads."""
        found = self._collect({peer: key}, own)[peer]
        self._store.delete_key(key)
        return found

    def first(self, keys: dict[int, str], own: Announcement) -> int:
        """Wait until one of several other ranks has announced under its key, and return it."""
        here: list[int] = []
        self._store.set(f"last/{self.rank}", json.dumps(own))

        def any_here() -> bool:
            here.extend(rank for rank, key in keys.items() if self._store.check([key]))
            return bool(here)

        self._wait(any_here, keys, own)
        return here[0]

    def fail(self, text: str) -> CollectiveError:
        """Report a failure to all ranks, and return the error to raise on this one."""
        self._store.set(_FAILED, text)
        return CollectiveError(text)

    def _collect(self, keys: dict[int, str], own: Announcement) -> dict[int, Announcement]:
        self._wait(lambda: self._store.check(list(keys.values())), keys, own)
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items()}

    def _wait(self, ready: Callable[[], bool], keys: dict[int, str], own: Announcement) -> None:
        deadline, pause = time.monotonic() + self._timeout, _FIRST_PAUSE
        while not ready():
            self._raise_failure()
            if time.monotonic() > deadline:
                raise self.fail(self._absence(keys, own))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._raise_failure()  # a late rank learns that the others have failed

    def _raise_failure(self) -> None:
        if self._store.check([_FAILED]):
            raise CollectiveError(self._store.get(_FAILED).decode())

    def _absence(self, keys: dict[int, str], own: Announcement) -> str:
        absent = [rank for rank, key in keys.items() if not self._store.check([key])]
        lines = [
            f"{_ranks(absent)} did not come within {self._timeout:g} s to what rank {self.rank} "
            f"waits in: {describe(own)}"
        ]
        for rank in absent:
            last = self.peek(f"last/{rank}")
            said = "has made no checked call yet" if last is None else f"last: {describe(last)}"
            lines.append(f"rank {rank} {said}")
        return "\n  ".join(lines)


def describe(call: Announcement) -> str:
    """Describe a call in words: operation, tensors, group and place in the code."""
    details = [f"{name} {value}" for name, value in call["what"].items() if value not in (None, [])]
    inside = f"({', '.join(details)})" if details else ""
    return f"{call['op']}{inside}, call {call['number']} of group {call['group']}, at {call['at']}"


def difference(calls: dict[int, Announcement]) -> str | None:
    """Return the difference between the ranks in words, or None if they agree."""
    by_call: dict[str, list[int]] = {}
    for rank, call in calls.items():
        by_call.setdefault(json.dumps([call["op"], call["what"]]), []).append(rank)
    problem = "the ranks of one group make different calls" if len(by_call) > 1 else None
    if problem is None and any("splits" in call for call in calls.values()):
        problem = _unequal_splits(calls)
    if problem is None:
        return None
    lines = [f"{_ranks(ranks)}: {describe(calls[ranks[0]])}" for ranks in by_call.values()]
    return "\n  ".join([problem, *lines])


def _unequal_splits(calls: dict[int, Announcement]) -> str | None:
    """Return in words which rank expects rows that another rank does not send."""
    ranks = sorted(calls)
    for i, sender in enumerate(ranks):
        for j, receiver in enumerate(ranks):
            sent, expected = calls[sender]["splits"]["input"], calls[receiver]["splits"]["output"]
            # A single number is all rows, split equally.
            sent = sent[j] if len(sent) > 1 else sent[0] / len(ranks)
            expected = expected[i] if len(expected) > 1 else expected[0] / len(ranks)
            if sent != expected:
                return (
                    f"rank {sender} sends {sent:g} rows to rank {receiver}, which expects "
                    f"{expected:g}"
                )
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(rank) for rank in ranks)}"
