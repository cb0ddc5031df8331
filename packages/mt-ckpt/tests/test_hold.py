"""Readers beside a saver that removes old steps: nothing is removed under them."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from mt_ckpt import (
    CheckpointError,
    TensorShard,
    hold_checkpoint,
    inspect_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)


def shards(step: int) -> list[TensorShard]:
    names = [f"model/layers.{i}" for i in range(4)]
    return [TensorShard(name, torch.full((30,), float(step))) for name in names]


def save(root, step: int, **options):
    return save_checkpoint(root, step, shards(step), {"step": step}, **options)


def steps(root) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step_*"))


def load(path) -> int:
    filled = shards(-1)
    step = load_checkpoint(path, filled)["step"]
    assert all(torch.equal(shard.tensor, torch.full((30,), float(step))) for shard in filled)
    return step


def test_a_reader_beside_a_saver_with_keep_1_never_fails(tmp_path):
    save(tmp_path, 1, keep=1)
    done = threading.Event()
    read: list[int] = []
    failures: list[Exception] = []

    def loop() -> None:
        while not done.is_set():
            try:
                with hold_checkpoint(tmp_path) as path:
                    step = inspect_checkpoint(path).step
                    assert load(path) == step
                read.extend([step, load(tmp_path)])
            except Exception as error:  # noqa: BLE001 - counted
                failures.append(error)

    readers = [threading.Thread(target=loop) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(2, 80):
        save(tmp_path, step, keep=1)
    done.set()
    for reader in readers:
        reader.join()
    assert failures == []
    assert len(set(read)) > 10
    save(tmp_path, 80, keep=1)
    assert steps(tmp_path) == [80]


def test_a_held_step_stays_until_a_save_after_it_is_let_go(tmp_path):
    save(tmp_path, 1)
    with hold_checkpoint(tmp_path) as path:
        for step in (2, 3):
            save(tmp_path, step, keep=1)
        assert steps(tmp_path) == [1, 3]
        assert load(path) == 1
        assert verify_checkpoint(path) == []
    save(tmp_path, 4, keep=1)
    assert steps(tmp_path) == [4]


def test_a_hold_ends_with_its_process(tmp_path):
    save(tmp_path, 1)
    code = (
        "import sys, time, mt_ckpt\n"
        "with mt_ckpt.hold_checkpoint(sys.argv[1]):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "held\n"
        save(tmp_path, 2, keep=1)
        assert steps(tmp_path) == [1, 2]
        reader.kill()
    save(tmp_path, 3, keep=1)
    assert steps(tmp_path) == [3]


def test_without_locks_a_step_stays_for_a_while_after_the_next(tmp_path, monkeypatch):
    def refuse(*_) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for step in (1, 2, 3):
        save(tmp_path, step, keep=1)
    assert steps(tmp_path) == [1, 2, 3]
    assert load(tmp_path) == 3
    long_ago = time.time() - 100
    os.utime(tmp_path / "step_00000002/mt-manifest.json", (long_ago, long_ago))
    save(tmp_path, 4, keep=1)
    assert steps(tmp_path) == [2, 3, 4]


def test_a_step_is_chosen_by_its_number(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    with hold_checkpoint(str(tmp_path), 2) as path:
        assert path == tmp_path / "step_00000002"
    with hold_checkpoint(tmp_path / "step_00000001") as path:
        assert path == tmp_path / "step_00000001"
    with (
        pytest.raises(CheckpointError, match=r"has no checkpoint of step 5 \(there: 1, 2, 3\)"),
        hold_checkpoint(tmp_path, 5),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".", "has no committed checkpoint"),
        ("nowhere", "nowhere: no such checkpoint directory"),
        ("step_00000001", "no such checkpoint directory"),
        ("step_00000002", "missing, so .*step_00000002 is not a complete checkpoint"),
    ],
)
def test_what_is_not_there_is_said_at_once(tmp_path, name, text):
    (tmp_path / "step_00000002").mkdir()
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=text):
        inspect_checkpoint(tmp_path / name)
    assert time.monotonic() - began < 5


def test_a_step_that_is_saved_again_waits_for_its_reader(tmp_path):
    save(tmp_path, 2)
    save(tmp_path, 1)
    with hold_checkpoint(tmp_path, 2) as path:
        writer = threading.Thread(target=save_checkpoint, args=(tmp_path, 2, [], {}))
        writer.start()
        time.sleep(0.3)
        assert load(path) == 2
    writer.join()
    assert inspect_checkpoint(path).arrays == {}
