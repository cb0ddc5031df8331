"""A gradient that is not finite, anywhere: nothing changes, and every rank knows where it is."""

import math
import random
from dataclasses import dataclass

import pytest
import torch
from mt_data_parallel import Reduction, reduce_partial_grads, shard
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
STRATEGIES = ("none", "optimizer", "optimizer_gradients", "full")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
DTYPES |= {"fp64": torch.float64}


@dataclass(frozen=True)
class Place:
    """Where and when a gradient is spoilt."""

    sizes: dict
    strategy: str
    optimizer: str
    dtype: str
    poison: float
    rank: int
    step: int
    microbatch: int  # in which it is spoilt
    num_microbatches: int
    reduced: bool  # whether the gradients are reduced already
    pick: float  # from 0 to 1, which parameter and element
    bf16_sum: bool
    local_sum: bool

    @property
    def layout(self):
        return ParallelLayout(**self.sizes)


def draw(number):
    source = random.Random(number)
    sizes = source.choice(LAYOUTS)
    num_microbatches = source.randrange(1, 4)
    return Place(
        sizes=sizes,
        strategy=source.choice(STRATEGIES),
        optimizer=source.choice(("adamw", "sgd", "lion")),
        dtype=source.choice(("fp16", "fp16", "bf16", "fp32", "fp64")),
        poison=source.choice((math.nan, math.inf, -math.inf)),
        rank=source.randrange(ParallelLayout(**sizes).world_size),
        step=source.randrange(STEPS),
        microbatch=source.randrange(num_microbatches),
        num_microbatches=num_microbatches,
        reduced=source.random() < 0.25,
        pick=source.random(),
        bf16_sum=source.random() < 0.25,
        local_sum=source.random() < 0.25,
    )


def held(state):
    """The parameters of a rank's stage: name, global shape, spec, axes of partial gradients."""
    stage, last = state.index("pp"), state.size("pp") - 1
    params = [
        (f"{stage}.column", (8, 5), PartitionSpec("tp"), ()),
        (f"{stage}.row", (5, 8), PartitionSpec(None, "tp"), ()),
        (f"{stage}.norm", (5,), PartitionSpec(), ("tp",)),
        (f"{stage}.experts", (4, 3, 2), PartitionSpec("ep"), ()),
    ]
    if stage in (0, last):
        params.append(("embedding", (8, 3), PartitionSpec("tp"), ("embedding",)))
    return params


class Part(nn.Module):
    """Parameters whose gradients are what the forward is given."""

    def __init__(self, params):
        super().__init__()
        self.names = list(params)
        self.params = nn.ParameterList(params.values())

    def forward(self, grads):
        """Return the sum of all products."""
        pairs = zip(self.names, self.params, strict=True)
        return sum((param * grads[name]).sum() for name, param in pairs)


class Stage(nn.Module):
    """Two separately fetched and released parts, and a parameter outside both."""

    def __init__(self, params):
        super().__init__()
        names = list(params)
        split = [{name: params[name] for name in part} for part in (names[:2], names[2:4])]
        self.parts = nn.ModuleList(map(Part, split))
        self.rest = Part({name: params[name] for name in names[4:]})

    def forward(self, grads):
        """Return the sum of all parts."""
        return sum(part(grads) for part in (*self.parts, self.rest))


class Run:
    """A small training on one rank, with gradients drawn by name and step."""

    def __init__(self, place, state):
        self.place, self.state, self.dtype = place, state, DTYPES[place.dtype]
        self.boxes, params = {}, {}
        for name, shape, spec, partial_grad in held(state):
            coordinates = state.layout.coordinates(state.rank)
            offsets = spec.offsets(shape, state.layout, coordinates)
            local = spec.local_shape(shape, state.layout)
            self.boxes[name] = (
                shape,
                tuple(slice(o, o + n) for o, n in zip(offsets, local, strict=True)),
            )
            params[name] = shard_param(
                nn.Parameter(self.drawn(name, 0)),
                spec,
                partial_grad=partial_grad,
                is_copy=name == "embedding" and state.index("pp") > 0,
            )
        self.params, self.model = params, Stage(params)
        self.buffer = shard(
            self.model,
            place.strategy,
            group=self.group,
            named_params=params.items(),
            bucket_size=40,
        )
        how = LossScale(initial=2.0**6, growth_interval=2, hysteresis=1, minimum=2.0**6)
        config = OptimizerConfig(
            name=place.optimizer,
            lr=1e-2,
            weight_decay=0.1,
            max_norm=1e3,
            loss_scale=how if place.dtype == "fp16" else None,
        )
        self.optimizer = DistributedOptimizer(
            self.buffer, lambda shards: build_optimizer(shards, config, state)
        )

    def axes(self, name):
        return "edp" if "experts" in name else "dp-cp"

    def group(self, name, _):
        return Reduction(
            replicas=self.state.group(self.axes(name)),
            reduce_dtype=torch.bfloat16 if self.place.bf16_sum else None,
            local_sum=self.place.local_sum,
        )

    def is_noted(self, name):
        """Whether the gradient is known from before the sum: there are ranks, or partial sums."""
        partial = "norm" in name or name == "embedding"
        return partial or self.state.size(self.axes(name)) > 1

    def drawn(self, name, step):
        shape, box = self.boxes[name]
        seed = sum(map(ord, name)) * 100 + step
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return whole[box].to(self.dtype)

    def backward(self, step, poisoned):
        """Give every parameter its gradients, one of which may be spoilt on this rank."""
        num = self.place.num_microbatches
        self.buffer.start(num)
        for microbatch in range(num):
            grads = {
                name: self.drawn(name, step + 1) / (self.state.size(self.axes(name)) * num)
                for name in self.params
            }
            if poisoned in grads and microbatch == self.place.microbatch:
                flat = grads[poisoned].view(-1)
                flat[int(self.place.pick * flat.numel())] = self.place.poison
            (self.model(grads) * self.optimizer.loss_scale).backward()
        self.buffer.finish()
        reduce_partial_grads(self.buffer.shards(), self.state)

    def spoil(self):
        """Put the poison into a reduced gradient of this rank; return whose it is."""
        pieces = self.optimizer.shards
        if not pieces:
            return None
        piece = pieces[int(self.place.pick * len(pieces))]
        grad = piece.grad.view(-1)
        grad[int(self.place.pick * grad.numel())] = self.place.poison
        return piece.name

    def snapshot(self):
        inner = self.optimizer.inner
        with self.buffer.gathered():
            values = [p.detach().clone() for p in self.params.values()]
        for piece in self.optimizer.shards:
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
        in_sum = name is not None and place.reduced and self.is_noted(name)
        return self.snapshot(), scales, report, (name, in_sum), untouched


def same(one, other):
    return one[1:] == other[1:] and all(
        torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True)
    )


def trained(place, with_poison):
    """Train with a spoilt step, or without this step; return the final state."""
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
    pytest.param(number, marks=() if number < 12 else pytest.mark.campaign) for number in range(200)
]


@pytest.mark.parametrize("number", PLACES)
def test_a_spoilt_gradient_changes_nothing_anywhere_and_is_named(ranks, number):
    place = draw(number)
    world = place.layout.world_size
    results = ranks(world, trained, place, True)
    without = ranks(world, trained, place, False)
    spoilt, in_sum = next((found for *_, found, _ in results if found[0]), (None, False))
    if spoilt is None:  # this rank steps nothing: nothing was spoilt
        assert place.strategy != "none"
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
    what = "nan" if math.isnan(place.poison) else "inf"
    # The rank that was spoilt, whoever steps that part and wherever the sum went.
    assert [(bad.rank, bad.name, bad.what, bad.in_sum) for bad in first.bad] == [
        (place.rank, spoilt, what, in_sum)
    ]
    assert first.num_bad == 1
    assert f"step {place.step + 1}: gradient norm" in first.why_skipped()
    assert f"rank {place.rank} {spoilt} {what}" in first.why_skipped()
    assert ("in the sum" in first.why_skipped()) == in_sum


def reported(strategy, own, options):
    """Give each of two ranks a gradient of its own; return what the skipped step says."""
    with ParallelState(ParallelLayout(dp=2)) as state:
        model = nn.ModuleDict({name: nn.Linear(6, 1, bias=False) for name in own[0]})
        group = Reduction(replicas=state.group("dp"), **options)
        buffer = shard(model, strategy, group=group, units=list(model.values()))
        config = OptimizerConfig(lr=1e-2, skip_above=5.0)
        make = lambda shards: build_optimizer(shards, config, state)  # noqa: E731
        optimizer = DistributedOptimizer(buffer, make)
        with buffer:
            buffer.start(1)
            rows = {name: torch.tensor([values]) for name, values in own[state.rank].items()}
            sum(model[name](row).sum() for name, row in rows.items()).backward()
            buffer.finish(scale=0.5)
            added = buffer.addends()
            return optimizer.step(), added


def row(*first):
    return [*first, *([0.0] * (6 - len(first)))]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_infinities_of_opposite_sign_are_named_as_what_they_were(ranks, strategy):
    own = [{"a": row(math.inf), "b": row(1.0)}, {"a": row(-math.inf), "b": row(0.0, math.nan)}]
    (result, added), (other, _) = ranks(2, reported, strategy, own, {})
    assert list(map(str, result.bad)) == [
        "rank 0 a.weight inf",
        "rank 1 a.weight inf",
        "rank 1 b.weight nan",
    ]
    assert other.why_skipped() == result.why_skipped()
    assert added == {"a.weight": math.inf, "b.weight": 0.5}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("large", "options"),
    [(3e38, {}), (3e38, {"local_sum": True}), (4e4, {"reduce_dtype": torch.float16})],
)
def test_a_sum_that_overflows_of_itself_is_nobodys_gradient(ranks, strategy, large, options):
    own = [{"a": row(1.0), "b": row(large)}, {"a": row(2.0), "b": row(large)}]
    (result, _), _ = ranks(2, reported, strategy, own, options)
    assert {(bad.name, bad.what, bad.in_sum) for bad in result.bad} == {("b.weight", "inf", True)}
    assert "in the sum, of gradients that were finite on all ranks" in result.why_skipped()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_is_too_large_is_named_with_the_rank_that_added_it(ranks, strategy):
    own = [{"a": row(1.0), "b": row(0.0, 0.5)}, {"a": row(0.0, -60.0), "b": row(0.25)}]
    (result, _), _ = ranks(2, reported, strategy, own, {"average": True})
    assert result.is_finite
    assert not result.stepped
    assert [(bad.rank, bad.name, bad.largest) for bad in result.bad[:2]] == [
        (1, "a.weight", 15.0),  # half of it is the average's, half of that finish's
        (0, "a.weight", 0.25),
    ]
