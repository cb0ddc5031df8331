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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from world import Result, Row, World, children, demand, expect, same_bits, spawn, train

VICTIMS = {"alone": 1, "a rank of two": 2, "the launcher": 2, "all ranks": 2}
CHAIN_STEPS = 12
# What a stand-in for the interpreter runs, so that the process to kill has a known id.
_PROGRAM = (
    "import os, sys; from mt_train.cli import main;"
    "open(sys.argv[1], 'w').write(str(os.getpid())); main(sys.argv[2:])"
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of run to kill again and again: the number of its ranks, and what it is given."""

    nproc: int = 2
    options: tuple[str, ...]


KINDS = {
    "MoE with ep 2, ZeRO-1": Kind(
        options=(
            "parallel.ep=2",
            "model.moe={num_experts: 4, top_k: 2}",
            "data_parallel.strategy=optimizer",
        )
    ),
    "ZeRO-3, bf16, fp8 moments, EMA": Kind(
        options=(
            "training.dtype=bf16",
            "data_parallel.strategy=full",
            "optimizer.moments_dtype=fp8",
            "optimizer.ema=0.9",
        )
    ),
    "fp8 with a history, 8-bit primary weights": Kind(
        options=(
            "training.dtype=bf16",
            "precision.recipe=delayed",
            "precision.history=4",
            "precision.primary_weights=true",
            "data_parallel.strategy=optimizer",
        )
    ),
    "state in files, remainder masters": Kind(
        nproc=1,
        options=(
            "training.dtype=bf16",
            "optimizer.masters=remainder",
            "optimizer.offload=1",
            "optimizer.offload_dir=OFFLOAD",
        ),
    ),
    "fp16 with a scale that overflows, ZeRO-2": Kind(
        options=(
            "training.dtype=fp16",
            f"optimizer.loss_scale={{initial: {2**22}}}",
            "data_parallel.strategy=optimizer_gradients",
        )
    ),
    "SOAP with tp 2 and QK-clip": Kind(
        options=(
            "parallel.tp=2",
            "optimizer.name=soap",
            "optimizer.soap_frequency=3",
            "optimizer.qk_clip={threshold: 0.05}",
        )
    ),
}


def _victims(kind: str, pid: int, rng: random.Random) -> list[int]:
    ranks = children(pid)
    if kind == "a rank of two":
        return [rng.choice(ranks)] if ranks else []
    return ranks if kind == "all ranks" else [pid]


def _kill(kind: str, pid: int, rng: random.Random) -> None:
    for victim in _victims(kind, pid, rng):
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def _start(
    world: World, out: Path, nproc: int, python: str = sys.executable
) -> subprocess.Popen[bytes]:
    command = [python, "-m", "mt_train", *world.train(out, "--nproc", str(nproc))]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def _program(
    world: World, scratch: Path, arguments: list[str]
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Start training as a fork, which is at work at once; yields its id and its stand-in."""
    path = scratch / "pid"
    path.unlink(missing_ok=True)
    command = [world.python, "-c", _PROGRAM, str(path), *arguments]
    null = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=null, stderr=null) as process:
        while not (path.exists() and path.read_text()):
            demand(process.poll() is None, f"ended with {process.returncode} before it began")
            time.sleep(0.01)
        yield int(path.read_text()), process


def _train(world: World, arguments: list[str], nproc: int) -> Result:
    """Run `mt-train`, and one rank in this process."""
    return train(arguments) if nproc == 1 else spawn([world.python, "-m", "mt_train", *arguments])


def _finish(world: World, arguments: list[str], nproc: int) -> Result:
    deadline = time.monotonic() + 20  # ranks of a killed launcher end by themselves
    while (result := _train(world, arguments, nproc)).code and time.monotonic() < deadline:
        demand("in use by" in result.errors, f"did not continue: {result.errors[-1500:]}")
        time.sleep(0.2)
    return result


def _reference(world: World, nproc: int) -> Path:
    return world.run if nproc == 1 else world.run_of_two


def _expect_undisturbed(world: World, out: Path, nproc: int) -> None:
    """Let the same command finish, and demand the bits of a run that nothing disturbed."""
    expect(_finish(world, world.train(out, "--nproc", str(nproc)), nproc), [0])
    same_bits(out, _reference(world, nproc))
    left = [path.name for path in out.rglob(".*") if ".tmp-" in path.name]
    demand(not left, f"left behind: {left}")


def random_kill(world: World, rng: random.Random, scratch: Path) -> None:
    """Kill twice at random moments, then let it finish."""
    out, kind = scratch / "run", rng.choice(list(VICTIMS))
    arguments = world.train(out, "--nproc", str(VICTIMS[kind]))
    for _ in range(2):
        with _program(world, scratch, arguments) as (pid, _):
            time.sleep(rng.uniform(0, 2.5))
            _kill(kind, pid, rng)
    _expect_undisturbed(world, out, VICTIMS[kind])


def kill_at_start(world: World, rng: random.Random, scratch: Path) -> None:
    """Kill while modules are imported, data is built or ranks join."""
    out, kind = scratch / "run", rng.choice(list(VICTIMS))
    with _start(world, out, VICTIMS[kind]) as process:
        time.sleep(rng.uniform(0.2, 2.5))
        _kill(kind, process.pid, rng)
    _expect_undisturbed(world, out, VICTIMS[kind])


def kill_kind(name: str, world: World, rng: random.Random, scratch: Path) -> None:
    """Kill a run that saves every step three times, each time at a later step."""
    kind, out = KINDS[name], scratch / "run"
    offload = world.folder / "offload"
    offload.mkdir(exist_ok=True)
    options = [each.replace("OFFLOAD", str(offload)) for each in kind.options]
    options += [f"training.steps={CHAIN_STEPS}", "checkpoint.every=1", "checkpoint.keep=2"]
    options += ["--nproc", str(kind.nproc)]

    def make(expected: Path) -> None:
        expect(_finish(world, world.train(expected, *options), kind.nproc), [0])

    expected = world.once(f"expected of {name}", make)
    arguments = world.train(out, *options)
    steps = sorted(rng.sample(range(CHAIN_STEPS), 3))
    for step in steps:
        with _program(world, scratch, arguments) as (pid, process):
            while _last_step(out) < step and process.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.2))
            victims = [v for v, nproc in VICTIMS.items() if nproc == kind.nproc]
            _kill(rng.choice(victims), pid, rng)
    expect(_finish(world, arguments, kind.nproc), [0])
    same_bits(out, expected, CHAIN_STEPS)
    left = [path.name for path in out.rglob(".*") if ".tmp-" in path.name]
    demand(not left, f"left behind: {left}")


def _last_step(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b'"loss"') if path.exists() else 0


def two_runs(world: World, rng: random.Random, scratch: Path) -> None:
    """Start a second run in the folder of an active one."""
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
    Row(name="random kill -9, twice a run", attack=random_kill, cases=24, sample=0, seconds=150),
    Row(name="kill -9 during start", attack=kill_at_start, cases=8, sample=0, seconds=200),
    Row(name="two runs, one folder", attack=two_runs, cases=10, sample=0, seconds=120),
    Row(name="writes that fail", attack=fill_the_disk, cases=12, sample=1, seconds=120),
    Row(name="parts of a run lost", attack=disagreeing_rerun, cases=10, sample=1, seconds=90),
]
ROWS += [
    Row(name=f"kill -9: {name}", attack=partial(kill_kind, name), cases=4, sample=0, seconds=200)
    for name in KINDS
]
