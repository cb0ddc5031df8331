"""The target of attacks: a small run with data, tokenizer and checkpoints, and ways to start it."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

MESSAGE_BYTES = 10_000
STEPS = 6
CODES = (0, 1, 2)

YAML = """\
model: {hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_size: 64}
data: {corpus: TEXTS, glob: '**/*.txt', vocab_size: 300, validation_fraction: 0.2}
training: {steps: 6, global_batch_size: 8, micro_batch_size: 2, sequence_length: 32, dtype: fp32}
optimizer: {lr: 3e-3, warmup: 2}
evaluation: {max_windows: 8}
checkpoint: {every: 2, keep: 3}
"""


class BadError(Exception):
    """An attack that succeeded."""


@dataclass(frozen=True, kw_only=True)
class World:
    """A finished run that nothing disturbed.

    Attributes:
        folder: Where cases make their own folders.
        config: The run's YAML file.
        run: The run folder, of one process.
        run_of_two: The same run on two processes, whose sums round otherwise.
        python: The interpreter of commands that start a process of their own: one that has imported
            torch, where the start itself is not what is attacked.
    """

    folder: Path
    config: Path
    run: Path
    run_of_two: Path
    python: str = sys.executable

    def copy(self, scratch: Path) -> Path:
        """Copy the run folder, to be damaged."""
        return Path(shutil.copytree(self.run, scratch / "run", symlinks=True))

    def train(self, out: Path, *more: str) -> list[str]:
        """Return the arguments of `mt-train` that train or continue in `out`."""
        return ["run", str(self.config), *more, "--out", str(out)]

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return what the first case to need it makes under this name."""
        path, new = self.folder / name, self.folder / f"{name}.new"
        with (self.folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                make(new)
                new.rename(path)
        return path


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the ledger.

    Attributes:
        name: Description of the attempt.
        attack: Does it once; raises if it was bad.
        cases: How often in a whole attack.
        sample: How often in CI.
        seconds: The longest that a case may take.
    """

    name: str
    attack: Callable[[World, random.Random, Path], None]
    cases: int
    sample: int = 1
    seconds: float = 60


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a command said and how it ended."""

    code: int
    output: str
    errors: str


def make_world(folder: Path, python: str) -> World:
    """Train the run that the cases copy; `python` is the interpreter of commands."""
    texts = folder / "texts"
    texts.mkdir()
    rng = random.Random(0)
    words = [f"{a}{b}" for a in ("red", "blue", "old", "new") for b in ("ish", "er", "ly", "")]
    for number in range(12):
        lines = (" ".join(rng.choices(words, k=9)) for _ in range(40))
        (texts / f"{number}.txt").write_text("\n".join(lines))
    config = folder / "run.yaml"
    config.write_text(YAML.replace("TEXTS", str(texts)))
    runs = {"run": folder / "run", "run_of_two": folder / "run-of-two"}
    world = World(folder=folder, config=config, **runs, python=python)
    for out, nproc in ((world.run, "1"), (world.run_of_two, "2")):
        result = spawn([world.python, "-m", "mt_train", *world.train(out, "--nproc", nproc)])
        if result.code:
            raise SystemExit(f"the run to attack could not be made:\n{result.errors}")
    preload()
    return world


# What commands import when a run begins.
IMPORTED = ("mt_train.cli", "mt_train.session.run", "mt_infer.cli", "zarr", "tokenizers", "tyro")


def preload() -> None:
    """Import what cases use, so that each finds it in memory."""
    import mt_ckpt
    import mt_data
    import mt_infer.cli
    import mt_train.cli
    import mt_train.session.run
    import tokenizers
    import torch._dynamo
    import zarr
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)
    del mt_ckpt, mt_data, mt_infer, mt_train, tokenizers, zarr, LlamaForCausalLM


def spawn(command: Sequence[str], **options: object) -> Result:
    """Run a command as a process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    done = subprocess.run(command, **{**pipes, **options}, check=False)
    return Result(
        code=done.returncode,
        output=(done.stdout or b"").decode(errors="replace"),
        errors=(done.stderr or b"").decode(errors="replace"),
    )


def call(main: Callable[[list[str]], None], arguments: Sequence[str]) -> Result:
    """Run a command in this process; an exception that it lets out is ours to see."""
    output = io.TextIOWrapper(io.BytesIO(), write_through=True)
    errors = io.TextIOWrapper(io.BytesIO(), errors="backslashreplace", write_through=True)
    code = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main(list(arguments))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    texts = [stream.buffer.getvalue().decode(errors="replace") for stream in (output, errors)]
    return Result(code=code, output=texts[0], errors=texts[1])


def train(arguments: Sequence[str]) -> Result:
    """Run `mt-train` in this process."""
    from mt_train.cli import main

    return call(main, arguments)


def infer(arguments: Sequence[str]) -> Result:
    """Run `mt-infer` in this process."""
    from mt_infer.cli import main

    return call(main, arguments)


def demand(fact: object, problem: str) -> None:
    """Raise BadError with `problem` unless `fact` holds."""
    if not fact:
        raise BadError(problem)


def expect(result: Result, codes: Sequence[int] = CODES, *, named: str = "") -> None:
    """Demand an exit code among `codes`, a short message, no traceback, and what it must name."""
    said = f"exit {result.code}\n{result.output[-500:]}\n{result.errors[-1500:]}"
    demand(result.code in codes, f"exit code not in {list(codes)}: {said}")
    demand("Traceback (most recent" not in result.errors + result.output, f"traceback: {said}")
    demand(len(result.errors) <= MESSAGE_BYTES, f"{len(result.errors)} bytes of message: {said}")
    if result.code:
        demand(result.errors.strip(), f"no message: {said}")
        demand(named in result.errors, f"{named!r} is not named: {said}")


def flip_bit(path: Path, rng: random.Random) -> None:
    """Flip one random bit of a file."""
    at = rng.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def children(pid: int) -> list[int]:
    """Return the ids of a process's children; none for an ended process."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def metrics(run: Path) -> list[dict]:
    """Return the rows of `metrics.jsonl`."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, float]:
    """Return the loss of every step."""
    return {row["step"]: row["loss"] for row in metrics(run) if "loss" in row}


def files_of(folder: Path) -> list[Path]:
    """Return every regular file below a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def same_bits(run: Path, expected: Path, step: int = STEPS) -> None:
    """Demand that two runs hold the same arrays and losses at a step."""
    name = f"checkpoints/step_{step:08d}"
    ours, theirs = (
        {
            p.relative_to(r / name): p.read_bytes()
            for p in files_of(r / name)
            if p.name != "mt-manifest.json"
        }
        for r in (run, expected)
    )
    demand(ours.keys() == theirs.keys(), f"other files: {sorted(ours.keys() ^ theirs.keys())[:5]}")
    other = [str(path) for path, content in ours.items() if content != theirs[path]]
    demand(not other, f"other content: {other[:5]}")
    demand(losses(run) == losses(expected), f"other losses: {losses(run)}")


def replace_with(path: Path, kind: str, scratch: Path) -> None:
    """Put something other than a regular file at a path."""
    content = path.read_bytes() if path.is_file() else b""
    if path.is_symlink() or path.is_file():
        path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "secret":
        path.symlink_to("/etc/passwd")
    elif kind == "link":
        target = scratch / "elsewhere"
        target.write_bytes(content)
        path.symlink_to(target)
    else:
        raise ValueError(kind)
