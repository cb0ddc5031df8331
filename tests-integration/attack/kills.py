"""Processes that die: the same command continues to the same bits."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from world import Result, Row, World, demand, expect, same_bits, spawn, train

KINDS = {"alone": 1, "a rank of two": 2, "the launcher": 2, "all ranks": 2}


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def _victims(kind: str, process: subprocess.Popen[bytes], rng: random.Random) -> list[int]:
    ranks = _children(process.pid)
    if kind == "a rank of two":
        return [rng.choice(ranks)] if ranks else []
    return ranks if kind == "all ranks" else [process.pid]


def _start(
    world: World, out: Path, nproc: int, python: str = sys.executable
) -> subprocess.Popen[bytes]:
    arguments = world.train(out, "--nproc", str(nproc))
    command = [python, "-m", "mt_train", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _kill_once(world: World, out: Path, kind: str, wait: float, rng: random.Random) -> None:
    process = _start(world, out, KINDS[kind])
    time.sleep(wait)
    for pid in _victims(kind, process, rng):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=60)


def _train(world: World, arguments: list[str], nproc: int) -> Result:
    """Run `mt-train`, and one rank in this process."""
    return train(arguments) if nproc == 1 else spawn([world.python, "-m", "mt_train", *arguments])


def _finish(world: World, out: Path, nproc: int) -> Result:
    arguments = world.train(out, "--nproc", str(nproc))
    deadline = time.monotonic() + 20  # ranks of a killed launcher end by themselves
    while (result := _train(world, arguments, nproc)).code and time.monotonic() < deadline:
        demand("in use by" in result.errors, f"did not continue: {result.errors[-1500:]}")
        time.sleep(0.2)
    return result


def _reference(world: World, nproc: int) -> Path:
    return world.run if nproc == 1 else world.run_of_two


def _expect_undisturbed(world: World, out: Path, nproc: int) -> None:
    """Let the same command finish, and demand the bits of a run that nothing disturbed."""
    expect(_finish(world, out, nproc), [0])
    same_bits(out, _reference(world, nproc))


def random_kill(world: World, rng: random.Random, scratch: Path) -> None:
    """Kill twice at random moments, then let it finish."""
    out, kind = scratch / "run", rng.choice(list(KINDS))
    for _ in range(2):
        _kill_once(world, out, kind, rng.uniform(1.5, 6), rng)
    _expect_undisturbed(world, out, KINDS[kind])
    left = [path.name for path in out.rglob(".*") if ".tmp-" in path.name]
    demand(not left, f"left behind: {left}")


def kill_at_start(world: World, rng: random.Random, scratch: Path) -> None:
    """Kill while data is built or ranks join."""
    out, kind = scratch / "run", rng.choice(list(KINDS))
    _kill_once(world, out, kind, rng.uniform(0.2, 2.5), rng)
    _expect_undisturbed(world, out, KINDS[kind])


def two_runs(world: World, rng: random.Random, scratch: Path) -> None:
    """Start a second run in the folder of one that is at work."""
    out, nproc = scratch / "run", rng.choice([1, 2])
    first = _start(world, out, nproc, world.python)
    time.sleep(rng.uniform(0.5, 3))
    working = (out / ".lock").exists() and first.poll() is None
    second = train(world.train(out, *rng.choice([(), ("optimizer.lr=1e-4",)])))
    code = first.wait(timeout=60)
    if working and second.code:
        expect(second, [1, 2], named="in use")
        demand(str(first.pid) in second.errors or "process" in second.errors, second.errors)
    was_first = working or second.code  # else the second had the folder before the first
    demand(code == 0 if was_first else code in (0, 1), f"the first run ended with {code}")
    if second.code:
        same_bits(out, _reference(world, nproc))


def fill_the_disk(world: World, rng: random.Random, scratch: Path) -> None:
    """Let writes fail beyond a size, then continue without that limit."""
    out = scratch / "run"
    limit = rng.choice([100, 1000, 5000, 20_000, 50_000, 200_000])
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}));"
        "from mt_train.cli import main; main(sys.argv[1:])"
    )
    expect(spawn([world.python, "-c", script, *world.train(out)]), [0, 1])
    _expect_undisturbed(world, out, 1)


def disagreeing_rerun(world: World, rng: random.Random, scratch: Path) -> None:
    """Lose a random part of a run folder, and continue."""
    out = world.copy(scratch)
    name = rng.choice(["data", "tokenizer.json", "config.yaml", "loss.png", "metrics.jsonl"])
    path = out / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    expect(train(world.train(out, "training.steps=8")), [0, 1, 2])


ROWS = [
    Row(name="random kill -9, twice a run", attack=random_kill, cases=100, sample=1, seconds=150),
    Row(name="kill -9 during start", attack=kill_at_start, cases=20, sample=1, seconds=120),
    Row(name="two runs, one folder", attack=two_runs, cases=10, sample=1, seconds=120),
    Row(name="writes that fail", attack=fill_the_disk, cases=12, sample=1, seconds=120),
    Row(name="parts of a run lost", attack=disagreeing_rerun, cases=10, sample=1, seconds=90),
]
