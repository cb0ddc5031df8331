"""Ways to do one thing, timed in turns, and what a benchmark says of them, and where."""

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

Seconds = tuple[float, float]  # of the clock, and of the processors
CLOCKS = ("wall", "cpu")
_FEWEST = 3  # rounds, whatever they take


def take_turns(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    repeats: int = 1,
    seconds: float = float("inf"),
    wait: Callable[[], object] | None = None,
) -> list[dict[str, Seconds]]:
    """Time all ways in each round, in another order each time, after each has run once.

    What else a machine does disturbs the ways of a round alike, so compare within rounds; it
    disturbs the processors' time of this process less than the clock. Every second round goes
    backwards, as a way finds in the caches what the one before it left there.

    Args:
        ways: By name.
        rounds: How many.
        repeats: Calls of a way in a round.
        seconds: After so many no round begins, except for the first three.
        wait: Called after each call and timed with it, such as `torch.cuda.synchronize`.

    Returns:
        For each round the seconds of each way, by the clock and of the processors (of all threads
        of this process).

    Raises:
        ValueError: There is nothing to time.
    """
    if not ways or rounds < 1 or repeats < 1:
        raise ValueError(
            f"{len(ways)} ways, {rounds} rounds of {repeats} calls: there is nothing to time; give "
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
    """Return the quartiles of one way's time over another's within rounds, by clock."""
    return {
        clock: quartiles(each[one][which] / each[other][which] for each in rounds)
        for which, clock in enumerate(CLOCKS)
    }


def quartiles(values: Iterable[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")


def shown(spread: Iterable[float]) -> str:
    """Write quartiles as a median with the middle half."""
    low, middle, high = spread
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def environment(*packages: str) -> dict[str, Any]:
    """Return date, command, kind of machine, and versions of Python and of packages."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "machine": f"{os.cpu_count()}-core {platform.machine()} CPU",
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def write_report(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write a report as JSON; not at all for None."""
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n")


def _seconds(way: Callable[[], object], repeats: int, wait: Callable[[], object] | None) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        way()
        if wait is not None:
            wait()
    return time.perf_counter() - wall, time.process_time() - cpu
