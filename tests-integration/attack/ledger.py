"""The ledger: for each row and seed the attempts and findings, the time and the commit.

It is a Markdown table, and the memory of an attack too: rows that it has of the same seed and
commit are not run again, so an interrupted attack goes on.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row of one seed. `seconds` is the sum over its cases, some of which run side by side."""

    attack: str
    seed: int
    tried: int
    bad: int
    seconds: int
    date: str
    commit: str

    @property
    def key(self) -> tuple[str, int]:
        """What the ledger has one entry for."""
        return self.attack, self.seed


def read(path: Path) -> dict[tuple[str, int], Entry]:
    """Return the entries of a ledger; a file that is not there has none."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else ():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == len(fields(Entry)) and cells[1].isdecimal():
            name, seed, tried, bad, seconds, date, commit = cells
            numbers = {"tried": int(tried), "bad": int(bad), "seconds": int(seconds)}
            entry = Entry(attack=name, seed=int(seed), **numbers, date=date, commit=commit)
            entries.append(entry)
    return {entry.key: entry for entry in entries}


def render(entries: Iterable[Entry]) -> str:
    """Return the ledger as Markdown, its last lines the sum of each seed."""
    found = list(entries)
    sums = []
    for seed in sorted({entry.seed for entry in found}):
        of_seed = [entry for entry in found if entry.seed == seed]
        tried, bad, seconds = (
            sum(getattr(entry, name) for entry in of_seed) for name in ("tried", "bad", "seconds")
        )
        sums.append(f"| **all** | **{seed}** | {tried} | {bad} | {seconds} | | |")
    lines = [
        "# Ledger of the last full attack",
        "",
        "`uv run nox -s attack -- --seed N` wrote it with Python "
        f"{platform.python_version()} and torch {version('torch')} on CPU, a row as soon as its "
        "cases were done; the seconds are those of all cases, two of which ran at a time. CI runs "
        "a sample of each row, and fails where a row is missing here. Indexes and records are "
        "drawn 100,000 times. A chat template has a process of its own: of those made to hurt "
        "there are 500, about what ten minutes allow.",
        "",
        f"| {' | '.join(field.name for field in fields(Entry))} |",
        "|---" * len(fields(Entry)) + "|",
        *(f"| {' | '.join(map(str, astuple(entry)))} |" for entry in found),
        *sums,
    ]
    return "\n".join(lines) + "\n"


def misfits(entries: Iterable[Entry], names: Iterable[str]) -> list[str]:
    """Return the entries of a ledger that do not fit the existing rows."""
    there, wanted = {entry.attack for entry in entries}, set(names)
    missing = [f"{name!r} is missing: run the attack" for name in sorted(wanted - there)]
    return missing + [f"{name!r} is no row any more" for name in sorted(there - wanted)]


def commit() -> str:
    """Return the short name of the commit at work."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
