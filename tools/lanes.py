"""Run nox sessions side by side, the longest first, and write down what each took.

    python tools/lanes.py --out FILE [--known FILE ...] SESSION[:LANES] ...

A session runs in one lane, or in as many as it says: then it starts as many processes itself, and
nothing else runs beside it. Its output comes when it ends. The order follows the seconds that
`--known` files have, the later file before the earlier; what is in none starts first. The exit
status is 1 if a session failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LANES = 2
NOX = (sys.executable, "-m", "nox", "--session")
VARIABLE = "MT_LANES"  # how many lanes a session has; what starts processes keeps to it


@dataclass(frozen=True, kw_only=True)
class Job:
    """One session and the lanes that it takes."""

    name: str
    lanes: int = 1


@dataclass(frozen=True, kw_only=True)
class Done:
    """One session's end: seconds since the start of all, seconds of all its processes' CPU."""

    name: str
    lanes: int
    start: float
    seconds: float
    cpu: float
    passed: bool


def run(jobs: Sequence[Job], command: Sequence[str] = NOX, lanes: int = LANES) -> list[Done]:
    """Run the jobs in their order, each as soon as its lanes are free; return them as they end."""
    begun = time.monotonic()
    waiting, ended, free = list(jobs), list[Done](), [lanes]
    change = threading.Condition()

    def work(job: Job) -> None:
        start = time.monotonic()
        code, cpu, output = _finish([*command, job.name], job.lanes)
        took = {"start": start - begun, "seconds": time.monotonic() - start, "cpu": cpu}
        with change:
            print(output, end="", flush=True)
            ended.append(Done(name=job.name, lanes=job.lanes, passed=code == 0, **took))
            free[0] += min(job.lanes, lanes)
            change.notify()

    while True:
        with change:
            change.wait_for(lambda: len(ended) == len(jobs) or _next(waiting, free[0]) is not None)
            if (job := _next(waiting, free[0])) is None:
                return ended
            waiting.remove(job)
            free[0] -= min(job.lanes, lanes)
        threading.Thread(target=work, args=[job]).start()


def _next(waiting: Sequence[Job], free: int) -> Job | None:
    """Return the first job that fits; one that needs all lanes is not passed by."""
    if waiting and waiting[0].lanes >= LANES > free:
        return None
    return next((job for job in waiting if min(job.lanes, LANES) <= free), None)


def _finish(command: Sequence[str], lanes: int) -> tuple[int, float, str]:
    """Run a command; return its exit code, the CPU seconds of its processes, and its output."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, VARIABLE: str(lanes)},
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen doesn't wait again
        output.seek(0)
        return process.returncode, usage.ru_utime + usage.ru_stime, output.read()


def in_order(jobs: Sequence[Job], known: Mapping[str, float]) -> list[Job]:
    """Return the jobs, the ones with the most lanes first, then the longest ones."""

    def key(job: Job) -> tuple[int, float]:
        return job.lanes, known.get(job.name, float("inf"))

    return sorted(jobs, key=key, reverse=True)


def read_known(paths: Sequence[Path]) -> dict[str, float]:
    """Return the seconds of each session in the files that exist."""
    known: dict[str, float] = {}
    for path in paths:
        if path.is_file():
            known |= {each["name"]: each["seconds"] for each in json.loads(path.read_text())}
    return known


def _job(text: str) -> Job:
    name, colon, lanes = text.rpartition(":")
    return Job(name=name, lanes=int(lanes)) if colon else Job(name=text)


def main(arguments: Sequence[str] | None = None, runner: Callable[..., list[Done]] = run) -> int:
    """Run the sessions named; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("jobs", nargs="+", type=_job, metavar="SESSION[:LANES]")
    parser.add_argument("--out", type=Path, required=True, help="where the durations are written")
    parser.add_argument("--known", type=Path, action="append", default=[], help="durations")
    options = parser.parse_args(arguments)
    done = runner(in_order(options.jobs, read_known(options.known)))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps([asdict(each) for each in done], indent=1) + "\n")
    failed = sorted(each.name for each in done if not each.passed)
    print(f"{len(done)} sessions, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
