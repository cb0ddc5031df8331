"""Timing of alternatives in turns, and the report of a benchmark."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

Seconds = tuple[float, float]  # wall time and processor time
CLOCKS = ("wall", "cpu")
_FEWEST = 3  # rounds, however long they take


def take_turns(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    repeats: int = 1,
    seconds: float = float("inf"),
    wait: Callable[[], object] | None = None,
) -> list[dict[str, Seconds]]:
    """Time all alternatives in each round, in changing order, after a warm-up call of each.

    Other work on the machine disturbs the alternatives of a round alike, so compare within rounds;
    it disturbs this process's processor time less than wall time. Every second round runs in
    reverse, because the caches hold the data of the previous alternative.

    Args:
        ways: The alternatives by name.
        rounds: Number of rounds.
        repeats: Number of calls of an alternative in a round.
        seconds: Time limit after which no round begins, except for the first three.
        wait: Function to call and time after each call, such as `torch.cuda.synchronize`.

    Returns:
        The wall time and processor time (of all threads of this process) of each alternative, for
        each round.

    Raises:
        ValueError: There is nothing to time.
    """
    if not ways or rounds < 1 or repeats < 1:
        raise ValueError(
            f"{len(ways)} ways, {rounds} rounds of {repeats} calls: there is nothing to time; pass "
            "at least one of each"
        )
    names = list(ways)
    begin = time.perf_counter()
    for way in ways.values():
        _seconds(way, 1, wait)
    found: list[dict[str, Seconds]] = []
    for turn in range(rounds):
        if turn >= _FEWEST and time.perf_counter() - begin > seconds:
            break
        start, line = turn % len(names), names[::-1] if turn % 2 else names
        order = line[start:] + line[:start]
        found.append({name: _seconds(ways[name], repeats, wait) for name in order})
    return found


def ratios(rounds: Sequence[Mapping[str, Seconds]], one: str, other: str) -> dict[str, list[float]]:
    """Return the quartiles of the ratio of two alternatives' times within rounds, by clock."""
    return {
        clock: quartiles(each[one][which] / each[other][which] for each in rounds)
        for which, clock in enumerate(CLOCKS)
    }


def quartiles(values: Iterable[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")


def shown(spread: Iterable[float]) -> str:
    """Format quartiles as a median with the middle half."""
    low, middle, high = spread
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def environment(*packages: str) -> dict[str, Any]:
    """Return the date, the command, the kind of machine, and versions of Python and packages."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "machine": f"{os.cpu_count()}-core {platform.machine()} CPU",
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def write_report(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write a report as JSON, unless `path` is None."""
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n")


def _seconds(way: Callable[[], object], repeats: int, wait: Callable[[], object] | None) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        way()
        if wait is not None:
            wait()
    return time.perf_counter() - wall, time.process_time() - cpu
