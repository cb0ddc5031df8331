"""Attack a run, its files and its commands, by seed, and count what went wrong.

    python tests-integration/attack/attack.py --out docs/attack.md    # what that ledger lacks
    python tests-integration/attack/attack.py --sample                # a few cases of most rows
    python tests-integration/attack/attack.py --row signals --out docs/attack.md   # one row
    python tests-integration/attack/attack.py --row signals --case 7       # one case again

A case is bad if it hangs, eats memory, ends in a traceback or an untyped exception, prints a
message that nobody reads to its end, or lets damage pass. Every case runs in its own process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ledger import Entry, commit, misfits, read, render
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
    began: float

    @property
    def is_late(self) -> bool:
        """Whether the case takes longer than its row allows."""
        return time.monotonic() > self.began + self.case.row.seconds


def rows() -> list[Row]:
    """Return every row of the ledger."""
    import checkpoints
    import commands
    import configuration
    import conversations
    import drawn
    import folders
    import foreign
    import interfaces
    import kills
    import models
    import pictures
    import retrieval
    import serving
    import surroundings
    import tokens

    modules = (
        kills,
        checkpoints,
        tokens,
        configuration,
        commands,
        interfaces,
        conversations,
        drawn,
        folders,
        foreign,
        pictures,
        models,
        retrieval,
        serving,
        surroundings,
    )
    return [row for module in modules for row in module.ROWS]


def attack(cases: Sequence[Case], world: World, seed: int) -> Iterator[tuple[Case, str, float]]:
    """Run the cases, some at a time; yield each with what went wrong, or nothing, and seconds."""
    waiting, running = list(reversed(cases)), list[Running]()
    while waiting or running:
        while waiting and len(running) < WORKERS:
            running.append(_start(waiting.pop(), world, seed))
        ready = select.select([each.pipe for each in running], [], [], 0.1)[0]
        for each in list(running):
            if each.pipe in ready or each.is_late:
                running.remove(each)
                problem = _finish(each, is_late=each.pipe not in ready)
                yield each.case, problem, time.monotonic() - each.began


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
    return Running(case=case, pid=pid, pipe=read, began=time.monotonic())


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


def _chosen(options: argparse.Namespace, known: dict[tuple[str, int], Entry]) -> list[Case]:
    found = [row for row in rows() if options.row in (None, row.name)]
    if not found:
        names = ", ".join(repr(row.name) for row in rows())
        raise SystemExit(f"no row is named {options.row!r}; there are: {names}")
    if options.case is not None:
        return [Case(row=row, number=options.case) for row in found]
    counts = {row: row.sample if options.sample else row.cases for row in found}
    for row in found:
        entry = known.get((row.name, options.seed))
        is_done = entry and not entry.bad and entry.tried == counts[row]
        if is_done and entry.commit == options.commit:
            del counts[row]
    return [Case(row=row, number=number) for row in counts for number in range(counts[row])]


def _run(cases: Sequence[Case], options: argparse.Namespace) -> Iterator[Entry]:
    """Run the cases, print the bad ones, and yield the entry of each finished row."""
    if not cases:
        return
    left = Counter(case.row.name for case in cases)
    tried, bad, seconds = Counter[str](), Counter[str](), Counter[str]()
    with (
        tempfile.TemporaryDirectory() as folder,
        RankPool() as pool,
        pool.programs(*IMPORTED) as programs,
    ):
        world = make_world(Path(folder), str(programs.python))
        for case, problem, took in attack(cases, world, options.seed):
            name = case.row.name
            tried[name] += 1
            seconds[name] += took
            if problem:
                bad[name] += 1
                again = f"--seed {options.seed} --row {name!r} --case {case.number}"
                print(f"BAD {again}\n{problem.rstrip()}\n", flush=True)
            if tried[name] == left[name]:
                yield Entry(
                    attack=name,
                    seed=options.seed,
                    tried=tried[name],
                    bad=bad[name],
                    seconds=round(seconds[name]),
                    date=datetime.now(UTC).date().isoformat(),
                    commit=options.commit,
                )


def _in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries of rows that there are, by row and seed."""
    order = {row.name: place for place, row in enumerate(rows())}
    there = (entry for entry in entries if entry.attack in order)
    return sorted(there, key=lambda entry: (order[entry.attack], entry.seed))


def _check(path: Path) -> int:
    problems = misfits(read(path).values(), [row.name for row in rows()])
    print("\n".join(f"{path}: {problem}" for problem in problems))
    return 1 if problems else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the attacks; the exit status is 1 if one was bad."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", action="store_true", help="a few cases of most rows")
    parser.add_argument("--row", help="only this row")
    parser.add_argument("--case", type=int, help="only this case of the row")
    parser.add_argument("--out", type=Path, help="ledger: rows it lacks are run, and put there")
    parser.add_argument("--check", type=Path, help="only compare the names of a ledger's rows")
    options = parser.parse_args(arguments)
    if options.check is not None:
        return _check(options.check)
    for number in (signal.SIGINT, signal.SIGHUP):  # ignored in a shell's background job
        signal.signal(number, signal.SIG_DFL)
    options.commit = commit()
    known = {} if options.out is None else read(options.out)
    for entry in _run(_chosen(options, known), options):
        known[entry.key] = entry
        counts = f"{entry.tried} tried, {entry.bad} bad, {entry.seconds} s"
        print(f"{entry.attack}: {counts}", flush=True)
        if options.out is not None:
            options.out.write_text(render(_in_order(known.values())))
    asked = [entry for entry in known.values() if options.row in (None, entry.attack)]
    found = [entry for entry in asked if entry.seed == options.seed]
    print(f"all: {sum(entry.tried for entry in found)} tried, {sum(e.bad for e in found)} bad")
    return 1 if any(entry.bad for entry in found) or not found else 0


if __name__ == "__main__":
    sys.exit(main())
