"""Saves in the background: the bytes of a save in the foreground, and no failure lost."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from mt_ckpt import (
    BackgroundSaver,
    CheckpointError,
    TensorShard,
    clean,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from mt_testing import KillAt, expect_kill


def shards(value, names=("model/w", "model/b")):
    return [TensorShard(name, torch.full((5, 3), float(value))) for name in names]


def load(path):
    found = shards(-1)
    step = load_checkpoint(path, found)["step"]
    assert all(bool((shard.tensor == step).all()) for shard in found)
    return step


def contents(path):
    files = sorted(each for each in path.rglob("*") if each.is_file())
    return {str(each.relative_to(path)): each.read_bytes() for each in files}


def fail_once(point):
    seen = []

    def event(name):
        if name == point and not seen:
            seen.append(name)
            raise OSError(28, "No space left on device")

    return event


def test_a_background_save_writes_the_bytes_of_a_foreground_save(tmp_path):
    tensors = [
        TensorShard("bf16", torch.randn(4, 3).bfloat16()),
        TensorShard("turned", torch.randn(4, 3).t()),
        TensorShard("number", torch.tensor(7)),
        TensorShard("empty", torch.zeros(0, 3)),
        TensorShard("half", torch.ones(2), global_shape=(4,), offsets=(0,)),
        TensorShard("half", torch.ones(2), global_shape=(4,), offsets=(2,)),
        TensorShard("half", torch.zeros(2), global_shape=(4,), offsets=(2,), write=False),
    ]
    first = save_checkpoint(tmp_path / "a", 3, tensors, {"a": [1, (2, 3)]})
    with BackgroundSaver(tmp_path / "b") as saver:
        saver.save(3, iter(tensors), {"a": [1, (2, 3)]})
        second = saver.wait()
    assert contents(first) == contents(second)
    assert saver.saved == second


def test_what_changes_after_the_call_is_not_in_the_checkpoint(tmp_path):
    go_on = threading.Event()

    def hold(name):
        if name == "save.begin":
            assert go_on.wait(60)

    state, metadata = shards(1), {"step": 1, "more": [1]}
    with BackgroundSaver(tmp_path, on_event=hold) as saver:
        saver.save(1, state, metadata)
        for shard in state:
            shard.tensor.zero_()
        metadata["step"] = 2
        metadata["more"].append(2)
        assert latest_checkpoint(tmp_path) is None
        assert (saver.saved, saver.failed) == (None, False)
        saver.check()  # does not wait
        go_on.set()
    assert load(tmp_path) == 1


def test_the_next_save_waits_and_takes_the_same_memory(tmp_path):
    written, places = [], []

    with BackgroundSaver(tmp_path, keep=1, on_event=written.append) as saver:
        for step in range(1, 5):
            saver.save(step, shards(step), {"step": step})
            assert written.count("save.after_latest") >= step - 1
            places.append({key: buffer.data_ptr() for key, buffer in saver._buffers.items()})
    assert places == [places[0]] * 4
    assert load(tmp_path) == 4
    assert len(list(tmp_path.glob("*step*"))) == 1


def save_and_ask(saver, ask):
    """Save in a block, in which the failure is asked for."""
    with saver:
        saver.save(2, shards(2), {"step": 2})
        if ask == "check":
            saver._thread.join()
            assert saver.failed
            saver.check()
        elif ask == "wait":
            saver.wait()
        elif ask == "save":
            saver.save(3, shards(3), {"step": 3})
        elif ask == "another error":
            raise KeyError("training")


@pytest.mark.parametrize("ask", ["check", "wait", "save", "end"])
def test_a_failure_is_raised_once_and_leaves_the_old_step(tmp_path, ask):
    save_checkpoint(tmp_path, 1, shards(1), {"step": 1})
    saver = BackgroundSaver(tmp_path, on_event=fail_once("save.data"))
    with pytest.raises(CheckpointError, match="No space left"):
        save_and_ask(saver, ask)
    assert load(tmp_path) == 1
    assert not saver.failed
    with saver:
        saver.save(4, shards(4), {"step": 4})
    assert load(tmp_path) == 4


def test_a_failure_beside_another_error_is_a_note_of_it(tmp_path):
    saver = BackgroundSaver(tmp_path, on_event=fail_once("save.data"))
    with pytest.raises(KeyError) as caught:
        save_and_ask(saver, "another error")
    assert "No space left on device" in caught.value.__notes__[0]


def test_a_save_beside_one_in_the_background_is_told(tmp_path):
    reached, go_on = threading.Event(), threading.Event()

    def hold(name):
        if name == "save.data":
            reached.set()
            assert go_on.wait(60)

    with BackgroundSaver(tmp_path, on_event=hold) as saver:
        saver.save(1, shards(1), {"step": 1})
        assert reached.wait(60)
        with pytest.raises(CheckpointError, match=r"is in use by process \d+ on .*saving step 1"):
            save_checkpoint(tmp_path, 2, shards(2), {"step": 2})
        go_on.set()
    assert load(tmp_path) == 1


def save_in_background(root, step, on_event=None):
    rank, group = 0, None
    if dist.is_initialized() and dist.get_world_size() > 1:
        rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    own = [f"model/{'wb'[rank]}"] if group is not None else ["model/w", "model/b"]
    with BackgroundSaver(root, group=group, keep=1, on_event=on_event) as saver:
        saver.save(step, shards(step, own), {"step": step})
        if group is not None:
            for turn in range(30):  # training goes on, on its own group
                value = torch.tensor([float(turn + rank)])
                dist.all_reduce(value)
                assert value.item() == 2 * turn + 1
        path = saver.wait()
    if group is not None:
        dist.destroy_process_group(group)
    return None if path is None else str(path)


@pytest.mark.parametrize(
    "point", ["save.arrays", "save.data", "save.manifest", "save.after_rename"]
)
def test_a_kill_in_the_background_leaves_the_old_step(tmp_path, ranks, point):
    save_checkpoint(tmp_path, 1, shards(1), {"step": 1})
    expect_kill(ranks, 1, save_in_background, tmp_path, 2, kill=KillAt(point))
    assert load(tmp_path) == 1
    clean(tmp_path)
    save_in_background(tmp_path, 2)
    assert load(tmp_path) == 2
    assert [path.name for path in tmp_path.glob("*step*")] == ["step_00000002"]


def test_ranks_save_in_the_background_while_they_train(tmp_path, ranks):
    for step in (1, 2):
        first, second = ranks(2, save_in_background, tmp_path, step)
        assert first == second == str(tmp_path / f"step_0000000{step}")
        assert load(tmp_path) == step
    assert verify_checkpoint(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_the_background_leaves_the_old_step(tmp_path, ranks, rank):
    save_checkpoint(tmp_path, 1, shards(1), {"step": 1})
    expect_kill(ranks, 2, save_in_background, tmp_path, 2, kill=KillAt("save.data", rank=rank))
    assert load(tmp_path) == 1
    clean(tmp_path)
    ranks(2, save_in_background, tmp_path, 2)
    assert load(tmp_path) == 2


def test_a_failure_of_one_rank_is_raised_on_all(tmp_path, ranks):
    save_checkpoint(tmp_path, 1, shards(1), {"step": 1})

    def fail():
        event = fail_once("save.data") if dist.get_rank() == 1 else None
        with pytest.raises(CheckpointError) as caught:
            save_in_background(tmp_path, 2, event)
        return str(caught.value)

    first, second = ranks(2, fail)
    assert first == second
    assert "rank 1: OSError: [Errno 28] No space left on device" in first
    assert load(tmp_path) == 1
