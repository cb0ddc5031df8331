"""Damaged or forged checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

from world import (
    STEPS,
    BadError,
    Row,
    World,
    demand,
    expect,
    files_of,
    flip_bit,
    infer,
    replace_with,
    train,
)

MANIFEST = "mt-manifest.json"
ODD_VALUES = (None, True, -1, 0, 10**30, -(10**18), 1e300, "", "x" * 5000, [], {}, [[]], "../../x")


def _step(run: Path) -> Path:
    return run / "checkpoints" / f"step_{STEPS:08d}"


def _load(step: Path) -> dict[str, bytes]:
    """Load every array of a step by the package's own reader."""
    import torch
    from mt_ckpt import TensorShard, load_checkpoint
    from mt_ckpt.manifest import read_manifest

    shards = [
        TensorShard(name, torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)))
        for name, spec in read_manifest(step).arrays.items()
    ]
    load_checkpoint(step, shards)
    return {shard.name: shard.tensor.numpy().tobytes() for shard in shards}


def _expect_refused(step: Path, name: str) -> None:
    """Demand that reading names the file, and that verifying finds something."""
    from mt_ckpt import CheckpointError, verify_checkpoint

    try:
        _load(step)
    except CheckpointError as error:
        demand(name in str(error), f"{name} is not named: {error}")
        demand(len(str(error)) < 20_000, "a long message")
    else:
        raise BadError(f"{name}: damage was loaded")
    demand(verify_checkpoint(step), f"{name}: verify found nothing")


def bit_flip(world: World, rng: random.Random, scratch: Path) -> None:
    """Flip a bit of any file of a checkpoint."""
    step = _step(world.copy(scratch))
    path = rng.choice(files_of(step))
    flip_bit(path, rng)
    _expect_refused(step, path.relative_to(step).as_posix())


def damaged_file(world: World, rng: random.Random, scratch: Path) -> None:
    """Cut, extend, empty, remove or exchange any file of a checkpoint."""
    step = _step(world.copy(scratch))
    path = rng.choice(files_of(step))
    content = path.read_bytes()
    how = rng.choice(["cut", "longer", "empty", "gone", "fifo", "folder", "device", "link", "huge"])
    if how == "cut":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif how == "longer":
        path.write_bytes(content + rng.randbytes(rng.randint(1, 99)))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "gone":
        path.unlink()
    elif how == "huge":
        os.truncate(path, 2**40)
    else:
        replace_with(path, how, scratch)
    _expect_refused(step, path.name)


def swapped(world: World, rng: random.Random, scratch: Path) -> None:
    """Exchange two files, of one step or of two."""
    run = world.copy(scratch)
    steps = sorted((run / "checkpoints").glob("step_*"))
    one = rng.choice(files_of(_step(run)))
    other = rng.choice(files_of(rng.choice(steps)))
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    if a != b:
        _expect_refused(_step(run), one.name)


def odd_pointer(world: World, rng: random.Random, scratch: Path) -> None:
    """Put something odd where `latest` or the manifest is; both commands must answer."""
    run = world.copy(scratch)
    path = rng.choice([run / "checkpoints" / "latest", _step(run) / MANIFEST])
    how = rng.choice(["fifo", "folder", "device", "secret", "nonsense", "renamed"])
    if how == "nonsense":
        path.write_bytes(rng.randbytes(rng.choice([0, 5, 10**6])))
    elif how == "renamed":
        renamed = run / "checkpoints" / "step_00000008"
        _step(run).rename(renamed)
        (run / "checkpoints" / "latest").write_text(f"{renamed.name}\n")
    else:
        replace_with(path, how, scratch)
    for result in (train(world.train(run, "training.steps=8")), _generate(run)):
        expect(result, [1, 2])
        demand("root:" not in result.errors, f"content of another file: {result.errors}")


def _generate(run: Path):
    return infer(["generate", str(run), "--prompt", "old", "--max-tokens", "2", "--greedy"])


def _forge(step: Path, change) -> None:
    """Rewrite the manifest with a seal that fits."""
    path = step / MANIFEST
    body = json.loads(path.read_text())
    del body["sha256"]
    change(body)
    rest = json.dumps(body, indent=0).removeprefix("{\n").encode() + b"\n"
    seal = hashlib.sha256(rest).hexdigest().encode()
    path.write_bytes(b'{"sha256": "' + seal + b'",\n' + rest)


def mutate(value: object, rng: random.Random, depth: int = 0) -> object:
    """Return a JSON value with one place of it exchanged."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            value.pop(key)
        elif rng.random() < 0.1:
            value[rng.choice(["../x", "/etc/passwd", "extra", "\0", "é" * 300])] = value[key]
        else:
            value[key] = mutate(value[key], rng, depth + 1)
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        value[rng.randrange(len(value))] = mutate(rng.choice(value), rng, depth + 1)
        return value
    return rng.choice(ODD_VALUES)


def forged_manifest(world: World, rng: random.Random, scratch: Path) -> None:
    """Change the manifest and seal it again: refused, or the same arrays."""
    from mt_ckpt import CheckpointError

    step = _step(world.copy(scratch))
    expected = _load(step)

    def change(body: dict) -> None:
        body.pop("metadata")
        mutate(body, rng)
        body.setdefault("metadata", {})

    _forge(step, change)
    try:
        found = _load(step)
    except CheckpointError as error:
        demand(len(str(error)) < 20_000, "a long message")
    else:
        demand(found == expected, "a forged manifest changed the arrays")


def forged_metadata(world: World, rng: random.Random, scratch: Path) -> None:
    """Change what the trainer wrote into a checkpoint and seal it: both commands answer."""
    run = world.copy(scratch)
    _forge(_step(run), lambda body: mutate(body["metadata"], rng))
    expect(train(world.train(run, "training.steps=8")))
    expect(_generate(run))


def flipped_under_a_command(world: World, rng: random.Random, scratch: Path) -> None:
    """Flip a bit of a chunk and let both commands read it."""
    run = world.copy(scratch)
    path = rng.choice([each for each in files_of(_step(run) / "model") if each.name[0] == "c"])
    flip_bit(path, rng)
    tensor = path.parent.name
    expect(train(world.train(run, "training.steps=8")), [1], named=tensor)
    expect(_generate(run), [1], named=tensor)


def poisoned(world: World, rng: random.Random, scratch: Path) -> None:
    """Train with a rate that ruins the weights: nothing ruined is what a later run starts from."""
    run = scratch / "run"
    rate = rng.choice(["1e39", "1e37", "1e20"])
    ruin = ("checkpoint.every=1", "training.steps=4", f"optimizer.lr={rate}", "optimizer.warmup=0")
    expect(train(world.train(run, *ruin)), [0, 1, 2])
    shutil.rmtree(run / "data", ignore_errors=True)
    result = train(world.train(run, "training.steps=4"))
    expect(result)
    demand(result.code == 0 or "checkpoint" in result.errors, result.errors)


ROWS = [
    Row(name="bit flips of a checkpoint", attack=bit_flip, cases=160, sample=2),
    Row(name="files of a checkpoint damaged", attack=damaged_file, cases=140, sample=2),
    Row(name="chunks swapped", attack=swapped, cases=50, sample=1),
    Row(name="`latest` and manifest replaced", attack=odd_pointer, cases=40, sample=1),
    Row(name="manifests forged and sealed", attack=forged_manifest, cases=140, sample=2),
    Row(name="metadata forged and sealed", attack=forged_metadata, cases=80, sample=1),
    Row(name="bit flips under a command", attack=flipped_under_a_command, cases=30, sample=1),
    Row(name="ruined weights", attack=poisoned, cases=6, sample=1),
]
