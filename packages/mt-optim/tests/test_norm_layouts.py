"""Every logical element counts once: 200 drawn layouts by arithmetic, some on processes."""

import math
import random

import numpy as np
import pytest
import torch
from mt_data_parallel import GradBuffer, Reduction, plan_buckets
from mt_optim import clip_grad_norm
from mt_parallel_state import (
    ParallelLayout,
    ParallelState,
    ParamSharding,
    PartitionSpec,
    is_owner,
    shard_param,
)
from torch import nn

EXPERT = {"etp", "ep", "edp"}
ZERO = ("none", "ranges", "hybrid")
KINDS = (*ZERO, "whole")


def draw_layout(number):
    """Return a layout of at most 16 ranks and how its optimizer is sharded."""
    draw = random.Random(number)
    while True:
        sizes = {axis: draw.choice((1, 1, 2, 2, 3, 4)) for axis in ("tp", "cp", "dp", "pp")}
        sizes |= {"ep": draw.choice((1, 1, 2, 4)), "etp": draw.choice((1, 2, sizes["tp"]))}
        try:
            layout = ParallelLayout(**sizes)
        except ValueError:
            continue
        if 1 < layout.world_size <= 16:
            return layout, draw.choice(ZERO)


def params_of(layout, rank):
    """The parameters of a rank's stage: name, global shape, record."""
    stage, last = layout.coordinates(rank)["pp"], layout.pp - 1
    tp = ("tp",) if layout.tp > 1 else ()
    held = {
        f"{stage}.qkv": ((24, 7), ParamSharding(PartitionSpec("tp"))),
        f"{stage}.proj": ((7, 24), ParamSharding(PartitionSpec(None, "tp"))),
        f"{stage}.norm": ((53,), ParamSharding(partial_grad=tp)),
        f"{stage}.experts": ((16, 12, 3), ParamSharding(PartitionSpec("ep", "etp"))),
        f"{stage}.router": ((16, 5), ParamSharding()),
    }
    if stage in (0, last):
        partial = ("embedding",) if last else ()
        record = ParamSharding(PartitionSpec("tp"), partial_grad=partial, is_copy=stage > 0)
        held["embedding"] = ((48, 5), record)
    return held


def sharing(layout, rank, name, record, zero):
    """The ranks that step the other parts of a parameter, and the place among such groups."""
    axes = "edp" if record.spec.axes & EXPERT else "dp-cp"
    ranks = layout.group_of(axes, rank)
    if zero == "none" or len(ranks) == 1:
        return (), 0
    if zero == "hybrid" and len(ranks) % 2 == 0:
        half = len(ranks) // 2
        block = ranks.index(rank) // half
        return tuple(ranks[block * half : (block + 1) * half]), block
    return tuple(ranks), 0


def counted(layout, rank, zero):
    """For each parameter of a rank: which of its logical elements it answers for."""
    held = params_of(layout, rank)
    groups = {n: sharing(layout, rank, n, record, zero) for n, (_, record) in held.items()}
    local = {n: record.spec.local_shape(shape, layout) for n, (shape, record) in held.items()}
    for peers in dict.fromkeys(peers for peers, _ in groups.values()):
        numels = {n: math.prod(local[n]) for n in held if groups[n][0] == peers}
        shared = [n for n in numels if held[n][1].partial_grad == ("embedding",)]
        plan = plan_buckets(numels, bucket_size=150, world_size=max(len(peers), 1), alone=shared)
        for name in numels:
            shape, record = held[name]
            part = (0, numels[name])
            if len(peers) > 1:
                part = plan.part_of(name, peers.index(rank), len(peers))
            owner = is_owner(record, layout, rank, peers=peers, replica=groups[name][1])
            if part is None or not owner:
                continue
            offsets = record.spec.offsets(shape, layout, layout.coordinates(rank))
            box = tuple(slice(o, o + n) for o, n in zip(offsets, local[name], strict=True))
            numbers = np.arange(math.prod(shape)).reshape(shape)[box].reshape(-1)
            yield name, shape, numbers[slice(*part)]


@pytest.mark.parametrize("number", range(200))
def test_every_logical_element_counts_once_in_every_layout(number):
    layout, zero = draw_layout(number)
    counts = {}
    for rank in range(layout.world_size):
        for name, shape, elements in counted(layout, rank, zero):
            np.add.at(counts.setdefault(name, np.zeros(math.prod(shape), int)), elements, 1)
    expected = {name for rank in range(layout.world_size) for name in params_of(layout, rank)}
    assert counts.keys() == expected
    for name, count in counts.items():
        assert (count == 1).all(), (layout, zero, name)


def logical(name, shape):
    seed = sum(map(ord, name))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_params(state):
    params = {}
    for name, (shape, record) in params_of(state.layout, state.rank).items():
        local = record.spec.local_shape(shape, state.layout)
        param = nn.Parameter(torch.zeros(local, dtype=torch.float64))
        params[name] = shard_param(
            param, record.spec, partial_grad=record.partial_grad, is_copy=record.is_copy
        )
    return params


def own_gradient(state, name):
    shape, record = params_of(state.layout, state.rank)[name]
    offsets = record.spec.offsets(shape, state.layout, state.layout.coordinates(state.rank))
    local = record.spec.local_shape(shape, state.layout)
    box = tuple(slice(o, o + n) for o, n in zip(offsets, local, strict=True))
    return logical(name, shape)[box]


def reductions(state, kind):
    """Over whom gradients are summed, of dense and of expert parameters."""
    found = {}
    for what, axes in (("dense", "dp-cp"), ("expert", "edp")):
        group, size = state.group(axes), state.size(axes)
        if kind == "none":
            found[what] = Reduction(replicas=group)
        elif kind == "hybrid" and size % 2 == 0:
            shards, replicas = state.level_groups(axes, (size // 2, 2))
            found[what] = Reduction(shards=shards, replicas=replicas)
        else:
            found[what] = Reduction(shards=group)
    return lambda name, _: found["expert" if "experts" in name else "dense"]


def clipped_errors(layout, kind):
    """Clip real gradients; return the norm and the largest error of a clipped element."""
    with ParallelState(layout) as state:
        params = make_params(state)
        with GradBuffer(
            params.items(),
            group=reductions(state, kind),
            bucket_size=150,
            whole=(lambda _, param: param.dim() > 1) if kind == "whole" else None,
        ) as buffer:
            buffer.start(1)
            replicas = {
                name: state.size("edp" if "experts" in name else "dp-cp") for name in params
            }
            sum(
                (param * own_gradient(state, name) / replicas[name]).sum()
                for name, param in params.items()
            ).backward()
            buffer.finish()
            norm = clip_grad_norm(buffer.shards(), state, 0.5)
            errors = [
                (
                    shard.grad.view(-1)
                    - own_gradient(state, shard.name).reshape(-1)[shard.start : shard.end]
                    * (0.5 / (norm + 1e-6))
                )
                .abs()
                .max()
                .item()
                for shard in buffer.shards()
            ]
        return norm, max(errors, default=0.0)


def assert_clips_like_one_rank(ranks, layout, kind):
    size = layout.world_size
    shapes = {
        name: shape for rank in range(size) for name, (shape, _) in params_of(layout, rank).items()
    }
    expected = torch.cat([logical(n, s).flatten() for n, s in shapes.items()]).norm().item()
    results = ranks(size, clipped_errors, layout, kind)
    for norm, error in results:
        assert norm == pytest.approx(expected, rel=1e-14)
        assert norm == results[0][0]
        assert error < 1e-15


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"dp": 4},
        {"dp": 2, "cp": 2},
        {"tp": 2, "dp": 2, "ep": 2},
        {"pp": 2, "dp": 2},
        {"dp": 4, "ep": 2},
        {"tp": 2, "cp": 2, "etp": 1, "ep": 2},
    ],
    ids=lambda sizes: "-".join(f"{axis}{size}" for axis, size in sizes.items()),
)
def test_clipped_gradients_equal_one_ranks(ranks, sizes, kind):
    assert_clips_like_one_rank(ranks, ParallelLayout(**sizes), kind)


def in_ci(number):
    """One drawn layout of eight, where it has eight ranks at most."""
    return number % 8 == 0 and draw_layout(number)[0].world_size <= 8


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=() if in_ci(n) else pytest.mark.campaign) for n in range(200)],
)
def test_clipped_gradients_equal_one_ranks_in_drawn_layouts(ranks, number):
    assert_clips_like_one_rank(ranks, draw_layout(number)[0], KINDS[(number + number // 8) % 4])
