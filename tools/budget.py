"""Say where the time of a check went, lane by lane; fail above a limit of the whole.

    python tools/budget.py LANES_FILE REPORTS [--limit 840 --slowness 1.9] [--out FILE]

The file of `tools/lanes.py` has what each session took; the JUnit files in REPORTS, one a session,
what of that were tests. Machines of the same size differ by more than two, so the limit is seconds
of one of them; `--slowness`, of `tools/slowness.py`, raises it on a slower one.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

from lanes import LANES
from ledger import read_cases

SLOWEST = 10


@dataclass(frozen=True, kw_only=True)
class Share:
    """Where the seconds of one session went.

    Attributes:
        name: The session's name.
        seconds: Seconds times lanes, from its start to its end.
        setup: What came before and after pytest: the environment, or all of it without tests.
        collection: What pytest did beside tests: imports, collection, its report.
        tests: What the tests took, with their fixtures.
        cpu: CPU seconds of all its processes.
    """

    name: str
    seconds: float
    setup: float
    collection: float
    tests: float
    cpu: float


def share(done: dict[str, float | str], reports: Path) -> Share:
    """Divide the time of a session that `tools/lanes.py` wrote down."""
    name, lanes = str(done["name"]), int(done["lanes"])
    whole = float(done["seconds"]) * lanes
    path = reports / f"{report_name(name)}.xml"
    if not path.is_file():
        return Share(
            name=name, seconds=whole, setup=whole, collection=0, tests=0, cpu=float(done["cpu"])
        )
    suites = ElementTree.parse(path).iter("testsuite")  # noqa: S314 - pytest wrote it
    suite = lanes * sum(float(each.get("time", "0")) for each in suites)
    tests = sum(case.seconds for case in read_cases(path))
    return Share(
        name=name,
        seconds=whole,
        setup=max(0.0, whole - suite),
        collection=max(0.0, suite - tests),
        tests=tests,
        cpu=float(done["cpu"]),
    )


def report_name(session: str) -> str:
    """Return the name of a session's JUnit file: of `tests(mt-x)` it is mt-x."""
    return session.partition("(")[2].rstrip(")") or session


def summary(shares: Sequence[Share], wall: float) -> dict[str, float]:
    """Return the sums over all sessions, and the lanes' idle seconds."""
    names = ("seconds", "setup", "collection", "tests", "cpu")
    sums = {name: sum(getattr(each, name) for each in shares) for name in names}
    return {"wall": wall, **sums, "idle": max(0.0, LANES * wall - sums["seconds"])}


def table(shares: Sequence[Share], total: dict[str, float]) -> list[str]:
    """Return the lines of the table, the longest session first."""
    lines = ["seconds  set-up  collection  tests     cpu  session (seconds times lanes)"]
    rows = sorted(shares, key=lambda each: each.seconds, reverse=True)
    for row in [*(asdict(each) for each in rows), {**total, "name": "all"}]:
        numbers = [row[name] for name in ("seconds", "setup", "collection", "tests", "cpu")]
        lines.append(
            "{:7.0f}  {:6.0f}  {:10.0f}  {:5.0f}  {:6.0f}  ".format(*numbers) + row["name"]
        )
    lines.append(f"wall {total['wall']:.0f} s, lanes idle for {total['idle']:.0f} s")
    return lines


def slowest(paths: Sequence[Path]) -> list[str]:
    """Return the lines of the slowest tests."""
    cases = sorted(
        (case for path in paths for case in read_cases(path)), key=lambda case: -case.seconds
    )
    lines = ["seconds  test"]
    for case in cases[:SLOWEST]:
        parameters = f"[{case.parameters}]" if case.parameters else ""
        lines.append(f"{case.seconds:7.1f}  {case.function}{parameters}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; the exit status is 1 if the whole is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("lanes", type=Path, help="what tools/lanes.py wrote")
    parser.add_argument("reports", type=Path, help="the folder of JUnit files that pytest wrote")
    parser.add_argument("--limit", type=float, metavar="SECONDS", default=float("inf"))
    text = "how many times as slow the machine is as the one that the limit is of"
    parser.add_argument("--slowness", type=float, default=1.0, help=text)
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    options = parser.parse_args(arguments)
    done = json.loads(options.lanes.read_text())
    shares = [share(each, options.reports) for each in done]
    wall = max((each["start"] + each["seconds"] for each in done), default=0.0)
    total = summary(shares, wall)
    reports = [options.reports / f"{report_name(each.name)}.xml" for each in shares]
    print("\n".join(table(shares, total)), end="\n\n")
    print("\n".join(slowest([path for path in reports if path.is_file()])))
    limit = options.limit * options.slowness
    if options.out:
        written = {
            "sessions": [asdict(each) for each in shares],
            **total,
            "slowness": options.slowness,
        }
        options.out.write_text(json.dumps(written, indent=1) + "\n")
    machine = f"a machine that is {options.slowness:.2f} times as slow"
    print(f"\n{wall:.0f} s of at most {limit:.0f}, on {machine}")
    if wall > limit:
        print("over budget: move what is exhaustive to the campaign, or speed it up")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
