import shutil

import pytest
import torch
import torch.distributed as dist
from mt_ckpt import MemoryCopies, TensorShard, latest_checkpoint, load_checkpoint, save_checkpoint
from mt_testing import KillAt, expect_kill


def whole(step):
    values = {
        "model/w": torch.arange(32.0).reshape(8, 4),
        "model/b": torch.arange(5.0).to(torch.bfloat16),
        "model/q": torch.arange(6.0).to(torch.float8_e4m3fn),
        "optimizer/count": torch.tensor(3),
        "optimizer/none": torch.zeros(0, 2),
    }
    return {name: (value.float() * (1 + step)).to(value.dtype) for name, value in values.items()}


def shards(rank, size, step):
    """One array in parts, one with copies, and the others on the last rank alone."""
    values = whole(step)
    rows = values.pop("model/w").tensor_split(size)
    start = sum(map(len, rows[:rank]))
    found = [TensorShard("model/w", rows[rank], global_shape=(8, 4), offsets=(start, 0))]
    found += [TensorShard("model/b", values.pop("model/b"), write=rank == 0, replica=rank != 0)]
    if rank == size - 1:
        found += [TensorShard(name, value) for name, value in values.items()]
    return found


def copies(memory, root, **options):
    """Return the copies of this rank, which is on one of two nodes."""
    node = memory / str(dist.get_rank() * 2 // dist.get_world_size())
    node.mkdir(parents=True, exist_ok=True)
    return MemoryCopies(node, root, group=dist.group.WORLD, **options)


def train(memory, root, steps, saved=10):
    rank, size = dist.get_rank(), dist.get_world_size()
    save_checkpoint(root, saved, shards(rank, size, saved), {"step": saved}, group=dist.group.WORLD)
    found = copies(memory, root)
    for step in steps:
        found.save(step, shards(rank, size, step), {"step": step})


def restored(memory, root):
    path = copies(memory, root).restore()
    return None if path is None else path.name


def check(path, step):
    found = shards(0, 1, -1)
    assert load_checkpoint(path, found) == {"step": step}
    for shard, expected in zip(found, shards(0, 1, step), strict=True):
        assert torch.equal(shard.tensor.float(), expected.tensor.float()), shard.name


@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 1), (3, 2)])
def test_a_lost_node_loses_no_step(tmp_path, ranks, before, after):
    memory, root = tmp_path / "memory", tmp_path / "checkpoints"
    ranks(before, train, memory, root, (12, 14))
    steps = {path.name for path in memory.rglob("step_*")}
    assert steps == {"step_00000014"}
    shutil.rmtree(memory / "0")
    # Another node is in its place, or fewer ranks are on the one that is left.
    (memory / "0").mkdir()
    (memory / "1").rename(memory / "0") if after == 1 else None
    assert ranks(after, restored, memory, root) == ["step_00000014"] * after
    check(latest_checkpoint(root), 14)
    assert not list(memory.rglob("rank_*"))
    assert ranks(after, restored, memory, root) == [None] * after


KILLS = [
    KillAt(point, rank=rank, nth=nth)
    for rank in (0, 1)
    for point, nth in (("copy.begin", 1), ("copy.piece", 1), ("copy.piece", 2), ("copy.whole", 1))
]


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(
            k, marks=() if i in (1, 7) else pytest.mark.campaign, id=f"{k.rank}-{k.point}-{k.nth}"
        )
        for i, k in enumerate(KILLS)
    ],
)
def test_ranks_that_die_in_a_copy_leave_a_whole_one(tmp_path, ranks, kill):
    """Whether a node is lost with them or not."""
    memory, root = tmp_path / "memory", tmp_path / "checkpoints"
    ranks(2, train, memory, root, (12,))
    expect_kill(ranks, 2, copied, memory, root, 14, kill=kill)
    before = {path: path.read_bytes() for path in memory.rglob("*") if path.is_file()}
    for nodes in ((), "0", "1"):
        for path, content in before.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for node in nodes:
            shutil.rmtree(memory / node)
        name = ranks(2, restored, memory, root)[0]
        assert name == "step_00000014" or (name == "step_00000012" and kill.point != "copy.whole")
        check(root / name, int(name[5:]))
        shutil.rmtree(root / name)
        (root / "latest").write_text("step_00000010\n")


def copied(memory, root, step, on_event):
    rank, size = dist.get_rank(), dist.get_world_size()
    found = copies(memory, root, on_event=on_event)
    found.save(step, shards(rank, size, step), {"step": step})


def test_copies_of_another_past_are_not_taken(tmp_path, ranks):
    def begin(name):
        memory, root = tmp_path / name / "memory", tmp_path / name / "checkpoints"
        ranks(2, train, memory, root, (12,))
        return memory, root

    memory, root = begin("newer")
    save_checkpoint(root, 20, shards(0, 1, 20), {"step": 20})
    assert ranks(2, restored, memory, root) == [None, None]
    memory, root = begin("set back")
    save_checkpoint(root, 5, shards(0, 1, 5), {"step": 5})
    assert ranks(2, restored, memory, root) == [None, None]
    memory, root = begin("deleted")
    shutil.rmtree(root)
    assert ranks(2, restored, memory, root) == [None, None]
    memory, root = begin("one is lost")
    for node in "01":
        shutil.rmtree(next((memory / node).glob("*/rank_000001")))
    assert ranks(2, restored, memory, root) == [None, None]
    assert latest_checkpoint(root).name == "step_00000010"
    assert not list(tmp_path.rglob("rank_*"))


def test_a_process_alone_has_copies_too(tmp_path):
    found = MemoryCopies(tmp_path, tmp_path / "checkpoints")
    found.save(3, shards(0, 1, 3), {"step": 3})
    found.save(4, shards(0, 1, 4), {"step": 4})
    check(MemoryCopies(tmp_path, tmp_path / "checkpoints").restore(), 4)


def test_a_damaged_copy_is_not_taken(tmp_path):
    MemoryCopies(tmp_path, tmp_path / "root").save(3, shards(0, 1, 3), {})
    (values,) = (
        p for p in tmp_path.glob("mt-copies-*/*/*/0/**/*") if p.name != "zarr.json" and p.is_file()
    )
    values.write_bytes(bytes(values.stat().st_size))
    with pytest.warns(UserWarning, match="the copy of step 3: .*damaged"):
        assert MemoryCopies(tmp_path, tmp_path / "root").restore() is None
    assert latest_checkpoint(tmp_path / "root") is None
