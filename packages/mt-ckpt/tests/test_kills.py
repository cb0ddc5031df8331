"""Real kills at random moments of saves, in the foreground and in the background."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings

import pytest
import torch
from mt_ckpt import (
    BackgroundSaver,
    TensorShard,
    clean,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)

SIZES = {"model/w": (300, 200), "model/b": (200,), "optimizer/exp_avg/w": (300, 200)}


def shards(value):
    return [
        TensorShard(name, torch.full(shape, float(value)))
        for name, shape in [*SIZES.items(), *((f"small/p{i}", (3,)) for i in range(6))]
    ]


def load(path):
    found = shards(-1)
    step = load_checkpoint(path, found)["step"]
    assert all(bool((shard.tensor == step).all()) for shard in found)
    return step


def save_forever(root, step, told, *, background):
    """Save one step after the other, and write the number of each saved step to `told`."""
    torch.set_num_threads(1)
    os.write(told, b"0\n")
    if not background:
        while True:
            step += 1
            save_checkpoint(root, step, shards(step), {"step": step}, keep=2)
            os.write(told, f"{step}\n".encode())
    with BackgroundSaver(root, keep=2) as saver:
        while True:
            step += 1
            saver.save(step, shards(step), {"step": step})
            if saver.saved is not None:
                os.write(told, f"{int(saver.saved.name[5:])}\n".encode())


def killed(root, step, seconds, *, background):
    """Fork a process that saves, kill it after a while, and return the last step it was told of."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        os.close(reads)
        try:
            save_forever(root, step, writes, background=background)
        finally:
            os._exit(1)
    os.close(writes)
    with os.fdopen(reads, "rb") as told:
        assert told.readline() == b"0\n"
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        lines = told.read().splitlines()
    return max(map(int, lines), default=0)


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.campaign)])
def test_kill_9_at_any_moment_tears_and_loses_nothing(tmp_path, monkeypatch, count):
    monkeypatch.setattr("mt_ckpt.stored.packing.MIN_ARRAYS", 0)
    monkeypatch.setattr("mt_ckpt.stored.packing.SMALL_BYTES", 100)
    rng, step, moved, during = random.Random(count), 0, 0, 0
    start = time.perf_counter()
    for trial in range(4):
        save_checkpoint(tmp_path / "trial", trial, shards(trial), {"step": trial}, keep=2)
    four_saves = time.perf_counter() - start  # a busy machine needs longer for them
    (root := tmp_path / "root").mkdir()
    for turn in range(count):
        before = step
        told = killed(root, step, rng.uniform(0, four_saves), background=turn % 2 == 1)
        found = latest_checkpoint(root)
        step = 0 if found is None else load(found)
        assert step >= max(told, before)
        moved += step > before
        during += any(path.name.startswith(".step") for path in root.iterdir())
        if turn % 3 == 0:  # otherwise the next save meets what the kill has left
            clean(root)
        if turn % 20 == 0 and found is not None:
            assert verify_checkpoint(root) == []
    assert moved > count // 4  # some kills came after saves
    assert during > count // 4  # and some in the middle of one
