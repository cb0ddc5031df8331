"""Attack a run, its files and its commands, by seed, and count what went wrong.

    python tests-integration/attack/attack.py                         # everything: tens of minutes
    python tests-integration/attack/attack.py --sample                # a few cases of every row
    python tests-integration/attack/attack.py --row signals --case 7       # one case again

A case is bad if it hangs, eats memory, ends in a traceback or an untyped exception, prints a
message that nobody reads to its end, or lets damage pass. Every case runs in its own process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from mt_testing import RankPool
from world import IMPORTED, Row, World, make_world

MEMORY_BYTES = 4 * 2**30
WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attack, named by its row and number."""

    row: Row
    number: int


@dataclass(frozen=True, kw_only=True)
class Running:
    """A case in its own process."""

    case: Case
    pid: int
    pipe: int
    deadline: float


def rows() -> list[Row]:
    """Return every row of the ledger."""
    import checkpoints
    import commands
    import configuration
    import folders
    import interfaces
    import kills
    import tokens

    modules = (kills, checkpoints, tokens, configuration, commands, interfaces, folders)
    return [row for module in modules for row in module.ROWS]


def attack(cases: Sequence[Case], world: World, seed: int) -> Iterator[tuple[Case, str]]:
    """Run the cases, some at a time, and yield each with what went wrong, or nothing."""
    waiting, running = list(reversed(cases)), list[Running]()
    while waiting or running:
        while waiting and len(running) < WORKERS:
            running.append(_start(waiting.pop(), world, seed))
        ready = select.select([each.pipe for each in running], [], [], 0.1)[0]
        for each in list(running):
            if each.pipe in ready or time.monotonic() > each.deadline:
                running.remove(each)
                yield each.case, _finish(each, is_late=each.pipe not in ready)


def _start(case: Case, world: World, seed: int) -> Running:
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) == 0:
        os.setsid()
        os.close(read)
        problem = _in_child(case, world, seed)
        os.write(write, problem.encode(errors="replace")[:4000] + b"\0")
        os._exit(0)
    os.close(write)
    return Running(case=case, pid=pid, pipe=read, deadline=time.monotonic() + case.row.seconds)


def _in_child(case: Case, world: World, seed: int) -> str:
    limit = _address_space() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    rng = random.Random(f"{seed}/{case.row.name}/{case.number}")
    try:
        with tempfile.TemporaryDirectory(dir=world.folder) as scratch:
            case.row.attack(world, rng, Path(scratch))
    except BaseException:
        return traceback.format_exc(limit=-4)
    return ""


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _finish(each: Running, *, is_late: bool) -> str:
    content = b""
    if not is_late:
        with os.fdopen(each.pipe, "rb") as file:
            content = file.read()
    else:
        os.close(each.pipe)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(each.pid, signal.SIGKILL)  # with what the case started
    os.waitpid(each.pid, 0)
    if is_late:
        return f"not done after {each.case.row.seconds} s"
    return content[:-1].decode() if content.endswith(b"\0") else "the process was killed"


def ledger(tried: dict[str, int], bad: dict[str, int], seed: int) -> str:
    """Return the Markdown table of what was tried and what went wrong."""
    lines = [
        "# Ledger of the last full attack",
        "",
        f"`uv run nox -s attack -- --seed {seed}` on {datetime.now(UTC).date().isoformat()}, "
        f"Python {platform.python_version()}, torch {version('torch')}, CPU. "
        "`tests-integration/attack/attack.py` wrote it. CI runs a sample of each row.",
        "",
        "| attack | tried | bad |",
        "|---|---|---|",
        *(f"| {name} | {count} | {bad[name]} |" for name, count in tried.items()),
        f"| **all** | {sum(tried.values())} | {sum(bad.values())} |",
    ]
    return "\n".join(lines) + "\n"


def _chosen(options: argparse.Namespace) -> list[Case]:
    found = [row for row in rows() if options.row in (None, row.name)]
    if not found:
        names = ", ".join(repr(row.name) for row in rows())
        raise SystemExit(f"no row is named {options.row!r}; there are: {names}")
    if options.case is not None:
        return [Case(row=row, number=options.case) for row in found]
    return [
        Case(row=row, number=number)
        for row in found
        for number in range(row.sample if options.sample else row.cases)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the attacks; the exit status is 1 if one was bad."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", action="store_true", help="a few cases of every row")
    parser.add_argument("--row", help="only this row")
    parser.add_argument("--case", type=int, help="only this case of the row")
    parser.add_argument("--out", type=Path, help="write the ledger there")
    options = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGHUP):  # ignored in a shell's background job
        signal.signal(number, signal.SIG_DFL)
    cases = _chosen(options)
    tried = dict.fromkeys((case.row.name for case in cases), 0)
    bad = dict.fromkeys(tried, 0)
    with (
        tempfile.TemporaryDirectory() as folder,
        RankPool() as pool,
        pool.programs(*IMPORTED) as programs,
    ):
        world = make_world(Path(folder), str(programs.python))
        for case, problem in attack(cases, world, options.seed):
            tried[case.row.name] += 1
            if problem:
                bad[case.row.name] += 1
                again = f"--seed {options.seed} --row {case.row.name!r} --case {case.number}"
                print(f"BAD {again}\n{problem.rstrip()}\n", flush=True)
            if tried[case.row.name] % 50 == 0:
                print(
                    f"{sum(tried.values())} of {len(cases)} cases, {sum(bad.values())} bad; "
                    f"now {case.row.name}",
                    flush=True,
                )
    text = ledger(tried, bad, options.seed)
    print(text)
    if options.out is not None:
        options.out.write_text(text)
    return 1 if sum(bad.values()) or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
