"""Random damage of every class of files, and manifests that anybody could have sealed."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import random
import shutil

import pytest
import torch
from mt_ckpt import (
    CheckpointError,
    TensorShard,
    inspect_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from mt_ckpt.manifest import MANIFEST, read_manifest

STEPS = (1, 6)  # no single bit makes one of the other


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Two steps with packs, plain chunks and slices."""
    for name, value in {
        "stored.packing.MIN_ARRAYS": 0,
        "stored.packing.SMALL_BYTES": 100,
        "grid.SLICED_BYTES": 512,
        "grid.SLICE_BYTES": 128,
        "grid.MIN_SLICE_BYTES": 64,
    }.items():
        monkeypatch.setattr(f"mt_ckpt.{name}", value)
    for step in STEPS:
        save_checkpoint(tmp_path / "root", step, shards(step), {"step": step})
    return tmp_path / "root"


def shards(value):
    sizes = {"model/sliced": (16, 16), "model/plain": (6, 7), "model/a": (5,), "model/b": (3, 2)}
    sizes |= {"optimizer/exp_avg/plain": (6, 7), "step": ()}
    return [
        TensorShard(name, torch.arange(torch.Size(shape).numel()).reshape(shape) + value)
        for name, shape in sizes.items()
    ]


def damage(rng, step, other, name):
    """Damage a file in one of five ways, and return the way."""
    file = step / name
    kind = rng.choice(["flip", "truncate", "swap", "missing", "other step"])
    data = file.read_bytes()
    if kind == "flip":
        position = rng.randrange(len(data))
        flipped = bytes([data[position] ^ (1 << rng.randrange(8))])
        file.write_bytes(data[:position] + flipped + data[position + 1 :])
    elif kind == "truncate":
        file.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "missing":
        file.unlink()
    elif kind == "other step":
        shutil.copy(other / name, file)
    else:
        mate = rng.choice([p for p in files_of(step) if p != name])
        file.write_bytes((step / mate).read_bytes())
    return kind


def files_of(step):
    return sorted(str(p.relative_to(step)) for p in step.rglob("*") if p.is_file())


@pytest.mark.parametrize("count", [120, pytest.param(5000, marks=pytest.mark.campaign)])
def test_damage_of_every_kind_is_found_and_named(root, count):
    rng, done = random.Random(count), set()
    other, step = (root / f"step_{number:08d}" for number in STEPS)
    manifest, names = inspect_checkpoint(step), files_of(step)
    # A document of Zarr may be the same in both steps.
    for turn in range(count):
        name = names[turn % len(names)]
        original = (step / name).read_bytes()
        kind = damage(rng, step, other, name)
        if (step / name).exists() and (step / name).read_bytes() == original:
            continue
        done.add((name, kind))
        problems = verify_checkpoint(step)
        assert name in [problem.file for problem in problems], (name, kind)
        tensor = next(p.tensor for p in problems if p.file == name)
        assert tensor == manifest.tensor_of(name) or name in manifest.packs
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(step, shards(0))
        assert name in str(caught.value), (name, kind)
        (step / name).write_bytes(original)
    load_checkpoint(step, shards(0))
    assert len(done) > min(count // 2, 4 * len(names))
    assert latest_checkpoint(root) == step


def nodes(value, path=()):
    """Yield the place of every value in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from nodes(below, (*path, key))


ODD = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**30,
    1.5,
    "",
    "x",
    "../x",
    "bfloat16",
    "\ud800",
    "0" * 32,
]
ODD += [
    [],
    {},
    [[]],
    [1, 2],
    [2**40, 2**40],
    {"a": 1},
    [0],
    "xxh3-128:" + "0" * 32,
    "__packs/00000.zip",
]


def forge(rng, body):
    """Change, remove, double or move one to three values."""
    for _ in range(rng.randint(1, 3)):
        places = [path for path in nodes(body) if path]
        *above, key = rng.choice(places)
        value = body
        for each in above:
            value = value[each]
        kind = rng.randrange(4)
        if kind == 0:
            value[key] = copy.deepcopy(rng.choice(ODD))
        elif kind == 1:
            del value[key]
        elif kind == 2 and isinstance(value, list):
            value.insert(key, copy.deepcopy(value[key]))
        elif isinstance(value, dict):
            value[rng.choice([*value, "new", "model/sliced/more"])] = value[key]


def seal(body, rng):
    """Return a manifest with a right seal; one in eight has a spoilt byte beneath it."""
    rest = bytearray(json.dumps(body, indent=0).removeprefix("{\n").encode())
    if rng.random() < 0.125:
        rest[rng.randrange(len(rest))] = rng.randrange(256)
    return b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


@pytest.mark.parametrize("count", [500, pytest.param(100_000, marks=pytest.mark.campaign)])
def test_a_forged_manifest_is_read_or_refused_with_a_typed_error(root, count):
    rng, step = random.Random(count), root / "step_00000006"
    body = json.loads((step / MANIFEST).read_text())
    del body["sha256"]
    refused = 0
    for turn in range(count):
        forged = copy.deepcopy(body)
        forge(rng, forged)
        (step / MANIFEST).write_bytes(seal(forged, rng))
        try:
            read_manifest(step)
        except CheckpointError:
            refused += 1
        if turn % 20 == 0:  # whoever reads on doesn't stumble either
            assert isinstance(verify_checkpoint(step), list)
            with contextlib.suppress(CheckpointError):
                load_checkpoint(step, shards(0))
    assert refused > count // 2
