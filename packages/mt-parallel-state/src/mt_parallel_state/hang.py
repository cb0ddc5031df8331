"""A thread that reports a hang: which rank waits in which collective, and where the others are.

It reads the recorder of collectives that torch keeps anyway (its "flight recorder"), a few times in
a minute, so that nothing is slower while nothing hangs. Check mode, which compares all calls, finds
the first call that differs; this report says that it is time for it.
"""

from __future__ import annotations

import json
import linecache
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch.distributed as dist
from mt_files import check_type

from mt_parallel_state.checked_group import call_site
from mt_parallel_state.groups import world_store

_LOG = logging.getLogger("mt_parallel_state")
_LOOKS = 12  # in the time after which a hang is reported
_PATIENCE = 6  # looks for which at most a rank waits for answers
_WAITING = "waiting in "
_MOST_NAMED = 16
# Versions of torch have one recorder for each backend.
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


@contextmanager
def report_hangs(*, seconds: float = 60.0, hint: str = "") -> Iterator[None]:
    """Log a warning (`mt_parallel_state`) where this rank waits in a collective for long.

    The lowest rank that waits names all that do, with operation, tensors and place in the code, and
    where the other ranks are; a rank that does not answer is stopped or gone. It does so once,
    until a collective ends. Without a process group, or with a store that makes no second
    connection, there is no report.

    Args:
        seconds: Time without any progress of this rank's collectives.
        hint: Last line of the report.
    """
    check_type("seconds", seconds, int, float)
    if not seconds > 0:
        raise ValueError(f"seconds={seconds} must be above 0")
    if not dist.is_initialized():
        yield
        return
    try:
        # A connection of its own: the main thread may wait inside of the other one.
        store = dist.PrefixStore("mt_parallel_state/hang", world_store().clone())
    except (RuntimeError, NotImplementedError):
        yield
        return
    watch = _Watch(store, seconds, hint)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


class _Watch:
    def __init__(self, store: dist.Store, seconds: float, hint: str) -> None:
        self._store, self._seconds, self._hint = store, seconds, hint
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._main = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-report", daemon=True)
        self._answered = 0  # questions of ranks that wait
        self._call: str | None = None  # what this rank waits in

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        groups, wait = _Still(), _Still()
        with suppress(dist.DistError, RuntimeError):  # the store goes with the job
            while not self._ended.wait(self._seconds / _LOOKS):
                here = self._here()
                is_still_here = wait.seconds(here) >= self._seconds
                if groups.seconds(_status()) < self._seconds:
                    self._call = None
                elif self._call is None:
                    self._call = _oldest(self._seconds) or (here[0] if is_still_here else None)
                    if self._call is not None:
                        self._report()
                self._answer()

    def _here(self) -> tuple[str | None, str]:
        """Return the operation that the main thread waits in, and its place in the code."""
        frame = sys._current_frames().get(self._main)
        return _python_wait(frame), call_site(frame)

    def _answer(self) -> None:
        """Answer the ranks that asked for the place of this rank."""
        asked = self._store.add("asked", 0)
        place = self._here()[1] if asked > self._answered else ""
        said = (
            f"elsewhere, at {place}" if self._call is None else f"{_WAITING}{self._call} at {place}"
        )
        for number in range(self._answered, asked):
            self._store.set(f"{number + 1}/{self._rank}", said)
        self._answered = asked

    def _report(self) -> None:
        """Ask all ranks where they are, and report it from the lowest one that waits."""
        number = self._store.add("asked", 1)
        self._answer()
        keys = [f"{number}/{rank}" for rank in range(self._world)]
        for _ in range(_PATIENCE):
            if self._ended.wait(self._seconds / _LOOKS):
                return
            if self._store.check(keys):
                break
        found: dict[str, list[int]] = {}
        for rank, key in enumerate(keys):
            answers = self._store.check([key])
            said = self._store.get(key).decode() if answers else "no answer: stopped, or gone"
            if rank < self._rank and said.startswith(_WAITING):
                return
            found.setdefault(said, []).append(rank)
        lines = [f"  {_named(ranks)}: {said}" for said, ranks in found.items()]
        first = f"no progress of collectives for {self._seconds:g} s"
        _LOG.warning("%s", "\n".join([first, *lines, *filter(None, [self._hint])]))


class _Still:
    """Measures how long a value has stayed the same."""

    def __init__(self) -> None:
        self._value: object = self
        self._since = 0.0

    def seconds(self, value: object) -> float:
        now = time.monotonic()
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since


def _records(*, entries: bool) -> Iterator[Mapping[str, Any]]:
    """Yield what torch's recorders hold: the state of each group, and the calls."""
    from torch._C import _distributed_c10d as c10d

    for name in _RECORDERS:
        if (dump := getattr(c10d, name, None)) is not None:
            yield json.loads(dump(includeCollectives=entries))


def _python_wait(frame: FrameType | None) -> str | None:
    """Name the operation of torch.distributed, or the `wait`, that a thread is in.

    Recorders may leave out messages between two ranks.
    """
    found = None
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(
        "torch.distributed"
    ):
        name, frame = frame.f_code.co_name, frame.f_back
        found = found if name == "wrapper" else name
    if found is None and frame is not None:
        number = frame.f_lineno or 0  # a thread at work may be between two lines
        line = linecache.getline(frame.f_code.co_filename, number).strip()
        found = line if ".wait(" in line else None
    return found


def _status() -> list[Any]:
    return [record.get("pg_status") for record in _records(entries=False)]


def _oldest(seconds: float) -> str | None:
    """Describe the first call that waits longer than a number of seconds."""
    for record in _records(entries=True):
        for call in record.get("entries", ()):
            age = time.time() - call["time_created_ns"] / 1e9
            if not call["retired"] and age >= seconds:
                of = [
                    f"{kind.lower()} {list(size)}"
                    for kind, size in zip(call["input_dtypes"], call["input_sizes"], strict=False)
                ]
                return f"{call['profiling_name']}({', '.join(of)})"
    return None


def _named(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"
