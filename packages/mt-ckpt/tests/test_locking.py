"""Savers, retention, `clean` and readers of one folder at the same time."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
import torch.distributed as dist
from mt_ckpt import (
    CheckpointError,
    TensorShard,
    clean,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from mt_testing import KillAt, expect_kill

BUSY = r"is in use by process \d+ on .* \(saving step 20, since .*\); wait until it is done"


def save(root, step, value=None, **options):
    value = step if value is None else value
    shards = [TensorShard(f"w{i}", torch.full((9,), float(value))) for i in range(3)]
    return save_checkpoint(root, step, shards, {"value": value}, **options)


def load(path):
    shards = [TensorShard(f"w{i}", torch.zeros(9)) for i in range(3)]
    value = load_checkpoint(path, shards)["value"]
    assert all(bool((shard.tensor == value).all()) for shard in shards)
    return value


@pytest.mark.parametrize("step", [20, 30])
def test_beside_a_save_another_is_told_who_saves_and_changes_nothing(tmp_path, step):
    told = []

    def meanwhile(name):
        if name == "save.begin":
            return
        with pytest.raises(CheckpointError, match=BUSY):
            save(tmp_path, step, -1, keep=1)
        told.append(name)

    save(tmp_path, 10)
    save(tmp_path, 20, on_event=meanwhile)
    assert len(told) == 6
    assert load(tmp_path) == 20
    assert load(tmp_path / "step_00000010") == 10
    assert load(save(tmp_path, 30, keep=1)) == 30  # the lock has ended with the save


def test_clean_removes_no_save_that_is_under_way(tmp_path):
    def meanwhile(name):
        if name in ("save.arrays", "save.data", "save.manifest"):
            with pytest.raises(CheckpointError, match=BUSY):
                clean(tmp_path)

    assert load(save(tmp_path, 20, on_event=meanwhile)) == 20
    assert clean(tmp_path) == []


def test_a_lock_ends_with_its_process(tmp_path, ranks):
    expect_kill(ranks, 1, save, tmp_path, 20, kill=KillAt("save.data"))
    assert len(clean(tmp_path)) == 1
    assert load(save(tmp_path, 20)) == 20


def test_a_failed_save_lets_go_of_the_lock(tmp_path):
    def fail(name):
        if name == "save.data":
            raise KeyError(name)

    with pytest.raises(CheckpointError, match=r"save\.data"):
        save(tmp_path, 20, on_event=fail)
    assert load(save(tmp_path, 20)) == 20


@contextlib.contextmanager
def others_may_be_first():
    """Pass over the refusal of a save or of `clean` beside another."""
    try:
        yield
    except CheckpointError as error:
        if not re.search(r"is in use by .*process|is saved already", str(error)):
            raise


def rounds(root, count):
    """Save the same steps on every rank alone, and return the steps that each says it saved."""
    saved = []
    for step in range(1, count + 1):
        dist.barrier()
        with others_may_be_first():
            save(root, step, 100 * step + dist.get_rank(), keep=1)
            saved.append(step)
        dist.barrier()
        assert load(root) // 100 == step
    return saved


@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.campaign)])
def test_of_savers_of_one_step_one_is_told_that_it_is_saved(tmp_path, ranks, count):
    first, second = ranks(2, rounds, tmp_path, count)
    assert sorted(first + second) == list(range(1, count + 1))
    assert verify_checkpoint(tmp_path) == []


def alternate(root, count):
    """Save, clean and read different steps on every rank with `keep=1`."""
    for turn in range(count):
        with others_may_be_first():
            save(root, 1 + turn * dist.get_world_size() + dist.get_rank(), keep=1)
        with others_may_be_first():
            clean(root)
        if latest_checkpoint(root) is not None:
            load(root)


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.campaign)])
def test_latest_loads_beside_savers_that_keep_one_step_and_clean(tmp_path, ranks, count):
    ranks(2, alternate, tmp_path, count)
    assert load(tmp_path) > 0
    clean(tmp_path)
    assert not list(tmp_path.glob(".step*"))
