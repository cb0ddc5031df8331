"""Say how long each session's tests took and which were the slowest; fail above a budget.

    python tools/budget.py --limit 180 --limit mt-pipeline=240 .nox/reports/*.xml

A file is a session. Its time is that of the tests, with collection, as pytest wrote it.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from ledger import read_cases

SLOWEST = 10


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


def _limit(text: str) -> tuple[str, float]:
    session, _, seconds = text.rpartition("=")
    return session, float(seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; the exit status is 1 if a session is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", type=Path, help="JUnit files that pytest wrote")
    parser.add_argument("--limit", type=_limit, action="append", default=[], metavar="[NAME=]SEC")
    options = parser.parse_args(arguments)
    lines, late = report(options.files, dict(options.limit))
    print("\n".join(lines))
    for line in late:
        print(f"over budget: {line}; move what is exhaustive to the campaign, or speed it up")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
