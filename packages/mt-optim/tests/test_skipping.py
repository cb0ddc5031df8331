"""A gradient that is not finite, anywhere: nothing changes, and every rank knows where it is."""

import math
import random
from dataclasses import dataclass

import pytest
import torch
from mt_data_parallel import GradBuffer, Reduction
from mt_optim import DistributedOptimizer, LossScale, OptimizerConfig, build_optimizer
from mt_parallel_state import ParallelLayout, ParallelState, PartitionSpec, shard_param
from torch import nn

STEPS = 5
LAYOUTS = (
    {"dp": 2},
    {"tp": 2},
    {"pp": 2},
    {"dp": 4},
    {"dp": 2, "cp": 2},
    {"tp": 2, "dp": 2},
    {"tp": 2, "pp": 2},
    {"pp": 2, "dp": 2},
    {"dp": 4, "ep": 2},
    {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
)
DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Place:
    """Where and when a gradient is spoilt."""

    sizes: dict
    sharded: bool
    optimizer: str
    dtype: str
    poison: float
    rank: int
    step: int
    reduced: bool  # whether the gradients are reduced already
    pick: float  # from 0 to 1, which parameter and element

    @property
    def layout(self):
        return ParallelLayout(**self.sizes)


def draw(number):
    source = random.Random(number)
    sizes = source.choice(LAYOUTS)
    return Place(
        sizes=sizes,
        sharded=source.random() < 0.5,
        optimizer=source.choice(("adamw", "sgd", "lion")),
        dtype=source.choice(("fp16", "fp16", "fp32", "fp64")),
        poison=source.choice((math.nan, math.inf, -math.inf)),
        rank=source.randrange(ParallelLayout(**sizes).world_size),
        step=source.randrange(STEPS),
        reduced=source.random() < 0.5,
        pick=source.random(),
    )


def held(state):
    """The parameters of a rank's stage: name, global shape, spec, whether it is a tied copy."""
    stage, last = state.index("pp"), state.size("pp") - 1
    params = [
        (f"{stage}.column", (8, 5), PartitionSpec("tp"), False),
        (f"{stage}.row", (5, 8), PartitionSpec(None, "tp"), False),
        (f"{stage}.norm", (5,), PartitionSpec(), False),
        (f"{stage}.experts", (4, 3, 2), PartitionSpec("ep"), False),
    ]
    if stage in (0, last):
        params.append(("embedding", (8, 3), PartitionSpec("tp"), stage > 0))
    return params


class Run:
    """A small training on one rank, with gradients that are drawn by name and step."""

    def __init__(self, place, state):
        self.place, self.state, self.dtype = place, state, DTYPES[place.dtype]
        self.boxes, params = {}, {}
        for name, shape, spec, is_copy in held(state):
            coordinates = state.layout.coordinates(state.rank)
            offsets = spec.offsets(shape, state.layout, coordinates)
            local = spec.local_shape(shape, state.layout)
            self.boxes[name] = (
                shape,
                tuple(slice(o, o + n) for o, n in zip(offsets, local, strict=True)),
            )
            params[name] = shard_param(nn.Parameter(self.drawn(name, 0)), spec, is_copy=is_copy)
        self.params = params
        self.buffer = GradBuffer(params.items(), group=self.group, bucket_size=40)
        how = LossScale(initial=2.0**6, growth_interval=2, hysteresis=1, minimum=2.0**6)
        config = OptimizerConfig(
            name=place.optimizer,
            lr=1e-2,
            weight_decay=0.1,
            max_norm=1e3,
            loss_scale=how if place.dtype == "fp16" else None,
        )
        self.optimizer = DistributedOptimizer(
            self.buffer, lambda pieces: build_optimizer(pieces, config, state)
        )

    def axes(self, name):
        return "edp" if "experts" in name else "dp-cp"

    def group(self, name, _):
        found = self.state.group(self.axes(name))
        return Reduction(shards=found) if self.place.sharded else Reduction(replicas=found)

    def drawn(self, name, step):
        shape, box = self.boxes[name]
        seed = sum(map(ord, name)) * 100 + step
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return whole[box].to(self.dtype)

    def backward(self, step, poisoned):
        """Give every parameter its gradient, one of which may be spoilt on this rank."""
        grads = {
            name: self.drawn(name, step + 1) / self.state.size(self.axes(name))
            for name in self.params
        }
        if poisoned in grads:
            flat = grads[poisoned].view(-1)
            flat[int(self.place.pick * flat.numel())] = self.place.poison
        self.buffer.start(1)
        total = sum((self.params[name] * grad).sum() for name, grad in grads.items())
        (total * self.optimizer.loss_scale).backward()
        self.buffer.finish()

    def spoil(self):
        """Put the poison into a reduced gradient of this rank; return whose it is."""
        pieces = self.optimizer.pieces
        if not pieces:
            return None
        piece = pieces[int(self.place.pick * len(pieces))]
        grad = piece.grad.view(-1)
        grad[int(self.place.pick * grad.numel())] = self.place.poison
        return piece.name

    def snapshot(self):
        inner = self.optimizer.inner
        values = [p.detach() for p in self.params.values()]
        for piece in self.optimizer.pieces:
            values.append(inner.master(piece.name))
            values += [inner.moment(piece.name, key) for key in inner.moments(piece.name)]
        rates = [group["lr"] for group in inner.param_groups]
        return [value.clone() for value in values], rates, inner.step_count

    def train(self, *, with_poison):
        place, here = self.place, self.state.rank == self.place.rank
        names = sorted(self.params)
        scales, report, name, untouched, taken = [], None, None, True, 0
        for step in range(STEPS):
            bad = step == place.step
            if bad and not with_poison:
                continue
            early = bad and here and not place.reduced
            self.backward(step, names[int(place.pick * len(names))] if early else None)
            if early:
                name = names[int(place.pick * len(names))]
            elif bad and here:
                name = self.spoil()
            left = self.snapshot()
            result = self.optimizer.step(lr=1e-2 / (taken + 1))
            scales.append(self.optimizer.loss_scale)
            taken += result.stepped
            if bad:
                report, untouched = result, same(left, self.snapshot())
        return self.snapshot(), scales, report, name, untouched


def same(one, other):
    return one[1:] == other[1:] and all(
        torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True)
    )


def trained(place, with_poison):
    """Train with a spoilt step, or without this step; return what is left of it."""
    with ParallelState(place.layout) as state:
        run = Run(place, state)
        with run.buffer:
            return run.train(with_poison=with_poison)


def expected_scales(place, spoilt):
    scale, clean, scales = 64.0 if place.dtype == "fp16" else 1.0, 0, []
    for step in range(STEPS):
        if place.dtype == "fp16":
            clean = 0 if step == spoilt else clean + 1
            if step == spoilt:
                scale = max(scale / 2, 64.0)
            elif clean == 2:
                scale, clean = scale * 2, 0
        scales.append(scale)
    return scales


PLACES = [
    pytest.param(number, marks=() if number < 24 else pytest.mark.campaign) for number in range(200)
]


@pytest.mark.parametrize("number", PLACES)
def test_a_spoilt_gradient_changes_nothing_anywhere_and_is_named(ranks, number):
    place = draw(number)
    world = place.layout.world_size
    results = ranks(world, trained, place, True)
    without = ranks(world, trained, place, False)
    spoilt = next((name for *_, name, _ in results if name), None)
    if spoilt is None:  # this rank steps nothing: nothing was spoilt
        assert place.sharded
        assert place.reduced
        return
    first = results[0][2]
    for (after, scales, report, _, untouched), (expected, *_) in zip(results, without, strict=True):
        assert untouched
        assert same(after, expected)  # as if there had never been such a step
        assert scales == expected_scales(place, place.step)
        assert not report.stepped
        assert report.step == place.step + 1
        assert report.why_skipped() == first.why_skipped()
        assert list(map(str, report.bad)) == list(map(str, first.bad))
    named = {(bad.rank, bad.name, bad.what) for bad in first.bad}
    what = "nan" if math.isnan(place.poison) else "inf"
    layout = place.layout
    axes = "edp" if "experts" in spoilt else "dp-cp"
    if place.reduced:
        assert named == {(place.rank, spoilt, what)}
    elif place.sharded:  # the rank that sums this range
        ((rank, *rest),) = named
        assert rest == [spoilt, what]
        assert rank in layout.group_of(axes, place.rank)
    else:
        assert named == {(rank, spoilt, what) for rank in layout.group_of(axes, place.rank)}
    assert f"step {place.step + 1}: gradient norm" in first.why_skipped()
    assert f"rank {first.bad[0].rank} {spoilt} {what}" in first.why_skipped()
