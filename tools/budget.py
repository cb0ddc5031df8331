"""Say how long each session's tests took and which were the slowest; fail above a budget.

    python tools/budget.py --limit 100 --limit mt-pipeline=120 --calibrate .nox/reports/*.xml

A file is a session. Its time is that of the tests, with collection, as pytest wrote it. Machines
of the same size differ by more than two, so limits are seconds of one of them: where a fixed piece
of work takes longer than it did there, `--calibrate` raises all limits by as much.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from ledger import read_cases

SLOWEST = 10
# What tests do: start a process, import torch, run Python, and many small operations.
PROBE = """
import torch
torch.set_num_threads(1)
x = torch.ones(32, 32)
for _ in range(100_000):
    x = (x @ x).tanh()
sum(i * i for i in range(3_000_000))
"""
PROBE_SECONDS = 1.9  # on the machine that limits are of


def session_seconds(path: Path) -> float:
    """Return the wall time of a session's tests."""
    suites = ElementTree.parse(path).iter("testsuite")  # noqa: S314 - pytest wrote it
    return sum(float(suite.get("time", "0")) for suite in suites)


def report(paths: Sequence[Path], limits: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Return the lines to print, and the sessions that are above their limit.

    Args:
        paths: One JUnit file a session, named after it.
        limits: Seconds by session; the key "" holds for those without their own.
    """
    lines, late = ["seconds  session"], []
    for path in sorted(paths, key=session_seconds, reverse=True):
        seconds, limit = session_seconds(path), limits.get(path.stem, limits.get("", float("inf")))
        lines.append(f"{seconds:7.0f}  {path.stem}")
        if seconds > limit:
            late.append(f"{path.stem}: {seconds:.0f} s of at most {limit:.0f}")
    cases = [case for path in paths for case in read_cases(path)]
    cases.sort(key=lambda case: case.seconds, reverse=True)
    lines += ["", "seconds  test"]
    for case in cases[:SLOWEST]:
        parameters = f"[{case.parameters}]" if case.parameters else ""
        lines.append(f"{case.seconds:7.1f}  {case.function}{parameters}")
    return lines, late


def slowdown() -> float:
    """Return how many times as long as there the probe takes here, two at once; at least 1."""

    def seconds() -> float:
        started = time.perf_counter()
        both = [subprocess.Popen([sys.executable, "-c", PROBE]) for _ in range(2)]
        if [process.wait() for process in both] != [0, 0]:
            raise SystemExit("the probe of the machine's speed failed; its error is above")
        return time.perf_counter() - started

    return max(1.0, min(seconds() for _ in range(3)) / PROBE_SECONDS)


def _limit(text: str) -> tuple[str, float]:
    session, _, seconds = text.rpartition("=")
    return session, float(seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; the exit status is 1 if a session is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", type=Path, help="JUnit files that pytest wrote")
    parser.add_argument("--limit", type=_limit, action="append", default=[], metavar="[NAME=]SEC")
    text = "raise the limits on a machine that is slower than the one they are of"
    parser.add_argument("--calibrate", action="store_true", help=text)
    options = parser.parse_args(arguments)
    slower = slowdown() if options.calibrate else 1.0
    limits = {name: seconds * slower for name, seconds in options.limit}
    lines, late = report(options.files, limits)
    print("\n".join(lines))
    if options.calibrate:
        print(f"limits times {slower:.2f}, as slow as this machine is")
    for line in late:
        print(f"over budget: {line}; move what is exhaustive to the campaign, or speed it up")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
