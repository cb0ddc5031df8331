"""Turn the JUnit files of a campaign into a Markdown table: what ran, and what it found.

    pytest -m campaign --junitxml campaign.xml
    python tools/ledger.py campaign.xml --out docs/campaign.md

One row a test function: how many cases passed and failed, their time and the day. Properties that
tests record (`record_property`) are listed below the table, one line a case. `--merge` brings the
rows of a part of the campaign into a ledger that is there, and leaves the others.
"""

import argparse
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree


@dataclass(frozen=True, kw_only=True)
class Case:
    """One test case of a JUnit file."""

    function: str
    parameters: str
    outcome: str
    seconds: float
    properties: dict[str, str] = field(default_factory=dict)


def read_cases(path: Path) -> Iterator[Case]:
    """The cases of a JUnit file, in its order."""
    for element in ElementTree.parse(path).iter("testcase"):  # noqa: S314 - pytest wrote it
        name, _, parameters = element.get("name", "").partition("[")
        outcome = "passed"
        for kind in ("failure", "error", "skipped"):
            if element.find(kind) is not None:
                outcome = "skipped" if kind == "skipped" else "failed"
        yield Case(
            function=f"{element.get('classname', '').replace('.', '/')}.py::{name}",
            parameters=parameters.removesuffix("]"),
            outcome=outcome,
            seconds=float(element.get("time", "0")),
            properties={
                item.get("name", ""): item.get("value", "") for item in element.iter("property")
            },
        )


def ledger(cases: Sequence[Case], command: str) -> str:
    """The table and the list of recorded properties, as Markdown."""
    functions: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        functions[case.function].append(case)
    today = datetime.now(UTC).date().isoformat()
    lines = [
        "# Ledger of the last full campaign",
        "",
        f"`{command}` on {today}, Python "
        f"{platform.python_version()}, torch {version('torch')}, CPU. `tools/ledger.py` wrote it. "
        "CI runs a sample of each, which is not counted here.",
        "",
        "| test | passed | failed | skipped | seconds | day |",
        "|---|---|---|---|---|---|",
    ]
    for function, its in functions.items():
        counts = [
            str(sum(case.outcome == kind for case in its))
            for kind in ("passed", "failed", "skipped")
        ]
        seconds = sum(case.seconds for case in its)
        lines.append(f"| `{function}` | {' | '.join(counts)} | {seconds:.0f} | {today} |")
    for function, its in functions.items():
        recorded = [case for case in its if case.properties]
        if recorded:
            lines += ["", f"## {function.rpartition('::')[2]}", ""]
            names = list(recorded[0].properties)
            lines += [f"| case | {' | '.join(names)} | |", "|---" * (len(names) + 2) + "|"]
            for case in recorded:
                values = [case.properties.get(name, "") for name in names]
                lines.append(f"| {case.parameters} | {' | '.join(values)} | {case.outcome} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A ledger's text: the text above the rows, the row of each test, and the list of each name."""

    head: str
    rows: dict[str, str]
    lists: dict[str, str]

    @classmethod
    def of(cls, text: str) -> "Parts":
        """The parts of a ledger."""
        table, *lists = re.split(r"^## ", text, flags=re.MULTILINE)
        head, line, rows = table.partition("|---|---|---|---|---|---|\n")
        return cls(
            head=head + line,
            rows={each.split("`")[1]: each for each in rows.splitlines() if each},
            lists={each.splitlines()[0]: each.rstrip("\n") for each in lists},
        )


def merged(old: str, new: str) -> str:
    """An old ledger with the rows and lists of a new one.

    A row stands in the place of its test's old one, else after the last of its folder.
    """
    had, found = Parts.of(old), Parts.of(new)
    order = list(had.rows)
    for function in [each for each in found.rows if each not in had.rows]:
        folder = "/".join(function.split("/")[:2])
        last = max((at for at, each in enumerate(order) if each.startswith(folder)), default=-2)
        order.insert(last + 1 if last >= 0 else len(order), function)
    rows, names = had.rows | found.rows, {each.rpartition("::")[2] for each in found.rows}
    lists = {name: text for name, text in had.lists.items() if name not in names} | found.lists
    table = had.head + "".join(f"{rows[function]}\n" for function in order)
    return table + "".join(f"\n## {text}\n" for text in lists.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the ledger; the exit status is 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", type=Path, help="JUnit files that pytest wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--command", default="uv run nox -s campaign")
    parser.add_argument("--merge", action="store_true", help="keep the other rows of the ledger")
    options = parser.parse_args(arguments)
    cases = [case for path in options.files for case in read_cases(path)]
    text = ledger(cases, options.command)
    options.out.write_text(merged(options.out.read_text(), text) if options.merge else text)
    failed = sum(case.outcome == "failed" for case in cases)
    print(f"{len(cases)} cases, {failed} failed: {options.out}")
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
