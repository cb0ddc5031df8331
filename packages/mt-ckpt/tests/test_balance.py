"""Ranks that hold the same data share the writing of it, by bytes."""

import math
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_ckpt import (
    BackgroundSaver,
    CheckpointError,
    TensorShard,
    load_checkpoint,
    param_shards,
    save_checkpoint,
    verify_checkpoint,
)
from mt_ckpt.disk import Disk
from mt_ckpt.plan import describe_shards, plan_arrays, share_out
from mt_ckpt.stored import packing
from mt_parallel_state import ParallelLayout, PartitionSpec, shard_param
from torch import nn

# Sizes of a small GPT: the embedding is most of it.
SHAPES = {
    "embedding": ((640, 64), PartitionSpec("tp")),
    "layers.0.qkv": ((4, 3, 16, 64), PartitionSpec("tp")),
    "layers.0.out": ((64, 64), PartitionSpec(None, "tp")),
    "layers.0.experts": ((4, 64, 32), PartitionSpec("ep", "etp")),
    "layers.0.norm": ((64,), PartitionSpec()),
}
LAYOUTS = {
    "dp": ParallelLayout(dp=2),
    "tp and dp": ParallelLayout(tp=2, dp=2),
    "ep and dp": ParallelLayout(dp=4, ep=2),
    "pp and dp": ParallelLayout(pp=2, dp=2),
}


def shards_of(layout, rank, *, fill=1.0):
    """Weights and two moments of a rank, of which each value is its name's number."""
    params = {}
    for number, (name, (shape, spec)) in enumerate(SHAPES.items()):
        if layout.pp == 1 or layout.coordinates(rank)["pp"] == number % layout.pp:
            param = nn.Parameter(torch.full(spec.local_shape(shape, layout), fill * number))
            params[name] = shard_param(param, spec)
    return [
        shard
        for prefix in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
        for shard in param_shards(params.items(), layout, rank, prefix=prefix)
    ]


SIZES = st.lists(st.integers(1, 100), min_size=1, max_size=60)


@settings(deadline=None)
@given(sizes=SIZES, fixed=SIZES, world=st.integers(1, 5))
def test_the_largest_goes_to_the_least_loaded_holder(sizes, fixed, world):
    everyone = list(range(world))
    bound = [(size, [number % world]) for number, size in enumerate(fixed)]
    ranks = share_out([*((size, everyone) for size in sizes), *bound])
    assert ranks[len(sizes) :] == [number % world for number in range(len(fixed))]
    loads, before = [0] * world, [0] * world
    for size, rank in zip(sizes + fixed, ranks, strict=True):
        loads[rank] += size
    for size, (rank,) in bound:
        before[rank] += size
    # A rank has more than another by the last object that it got, or by what it alone holds.
    for rank in everyone:
        got = [size for size, owner in zip(sizes, ranks, strict=False) if owner == rank]
        if got:
            assert loads[rank] - min(got) <= min(loads)
        else:
            assert loads[rank] == before[rank]


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_chunk_has_one_writer_that_holds_it_and_all_write_alike(name):
    layout = LAYOUTS[name]
    shards = [shards_of(layout, rank) for rank in range(layout.world_size)]
    plan = plan_arrays([describe_shards(each) for each in shards])
    written = Counter()
    for array, spec in plan.arrays.items():
        writers = plan.writers.get(array)
        if writers is not None:
            assert len(writers) == spec.num_chunks
            for rank in writers:
                assert any(shard.name == array for shard in shards[rank])
                written[rank] += spec.chunk_bytes
    assert written.total() > 3 * 4 * sum(math.prod(shape) for shape, _ in SHAPES.values())
    for stage in range(layout.pp):  # what a stage has, others don't
        loads = [written[r] for r in written if layout.coordinates(r)["pp"] == stage]
        assert len(loads) == layout.world_size // layout.pp
        assert max(loads) - min(loads) <= max(spec.chunk_bytes for spec in plan.arrays.values())


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("name", "packed"), [("dp", False), ("dp", True), ("ep and dp", False)])
def test_ranks_of_data_parallel_write_alike(tmp_path, ranks, name, packed, background):
    layout = LAYOUTS[name]

    def save():
        packing.MIN_ARRAYS = 0 if packed else 256
        rank, group, kept, count = dist.get_rank(), dist.group.WORLD, 0, Counter()
        shards, write = shards_of(layout, rank), Disk.write

        def counted(disk, descriptor, data):
            size = write(disk, descriptor, data)
            count["bytes"] += size
            return size

        with mock.patch.object(Disk, "write", counted):
            if background:
                with BackgroundSaver(tmp_path, group=group) as saver:
                    for step in (1, 2):
                        saver.save(step, shards, {})
                        kept = sum(buffer.nbytes for buffer in saver._buffers.values())
            else:
                save_checkpoint(tmp_path, 2, shards, {}, group=group)
        found = shards_of(layout, rank, fill=0.0)
        load_checkpoint(tmp_path, found, group=group)
        for shard, expected in zip(found, shards, strict=True):
            assert torch.equal(shard.tensor, expected.tensor)
        return count["bytes"], kept

    counts = ranks(layout.world_size, save)
    total = sum(count for count, _ in counts)
    share = 1 / layout.world_size
    assert all(0.8 * share < count / total < 1.2 * share for count, _ in counts), counts
    if background:  # a rank copies what it writes, and nothing else
        assert sum(kept for _, kept in counts) == 12 * sum(math.prod(s) for s, _ in SHAPES.values())
    assert verify_checkpoint(tmp_path) == []


def test_a_box_that_is_no_replica_is_written_by_its_rank_alone():
    tensor = torch.zeros(4, 4)
    given = [
        [TensorShard("w", tensor)],
        [TensorShard("w", tensor, write=False)],
        [TensorShard("w", tensor[:2], global_shape=(4, 4), write=False, replica=True)],
    ]
    assert plan_arrays([describe_shards(each) for each in given]).writers == {}
    given[1] = [TensorShard("w", tensor, write=False, replica=True)]
    with pytest.raises(CheckpointError, match="no rank writes the part"):
        plan_arrays([describe_shards(each) for each in given[1:]])
