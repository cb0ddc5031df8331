import math
import random

import pytest
import torch
import torch.distributed as dist
from mt_data_parallel import GradBuffer, Reduction
from mt_optim import (
    AdamW,
    DistributedOptimizer,
    GradLimits,
    NormGroup,
    OptimizerConfig,
    StepGuard,
    build_optimizer,
)
from mt_optim.gradients.statistics import by_layer
from mt_parallel_state import ParallelLayout, ParallelState, PartitionSpec, shard_param
from torch import nn

LAYOUTS = (
    {"dp": 2},
    {"tp": 2, "pp": 2},
    {"tp": 2, "dp": 2},
    {"dp": 2, "cp": 2},
    {"dp": 4, "ep": 2},
    {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
    {"pp": 2, "dp": 2},
)


def logical(name, shape):
    """The whole gradient of a parameter; about half of its elements are zero."""
    seed = sum(map(ord, name))
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.relu()


def params_of(stage, stages):
    held = {
        f"layers.{stage}.mixer.qkv": ((8, 5), PartitionSpec("tp")),
        f"layers.{stage}.mixer.out": ((5, 8), PartitionSpec(None, "tp")),
        f"layers.{stage}.norm.weight": ((7,), PartitionSpec()),
        f"layers.{stage}.experts.up": ((4, 6, 3), PartitionSpec("ep")),
    }
    if stage in (0, stages - 1):
        held["embedding.weight"] = ((8, 3), PartitionSpec("tp"))
    return held


def reference(stages):
    whole = {}
    for stage in range(stages):
        whole |= {n: logical(n, shape) for n, (shape, _) in params_of(stage, stages).items()}
    return whole


GROUPS = (NormGroup(names="*.experts.*", max_norm=0.25), NormGroup(names="embedding.*", max_norm=9))


def admitted(sizes, sharded):
    """What a guard says of the logical gradient, and its error after clipping per group."""
    with ParallelState(ParallelLayout(**sizes)) as state:
        stage, stages = state.index("pp"), state.size("pp")
        params, grads = {}, {}
        for name, (shape, spec) in params_of(stage, stages).items():
            offsets = spec.offsets(shape, state.layout, state.layout.coordinates(state.rank))
            local = spec.local_shape(shape, state.layout)
            box = tuple(slice(o, o + n) for o, n in zip(offsets, local, strict=True))
            grads[name] = logical(name, shape)[box]
            param = nn.Parameter(torch.zeros(local, dtype=torch.float64))
            params[name] = shard_param(param, spec, is_copy=name[0] == "e" and stage > 0)

        def group(name, _):
            found = state.group("edp" if "experts" in name else "dp-cp")
            return Reduction(shards=found) if sharded else Reduction(replicas=found)

        with GradBuffer(params.items(), group=group, bucket_size=60) as buffer:
            buffer.start(1)
            sum(
                (p * grads[n] / state.size("edp" if "experts" in n else "dp-cp")).sum()
                for n, p in params.items()
            ).backward()
            buffer.finish()
            guard = StepGuard(
                buffer.shards(),
                state,
                limits=GradLimits(max_norm=1.0, norm_groups=GROUPS),
                zeros=True,
                statistics=by_layer,
            )
            result = guard.admit()
            factors = {
                shard.name: (
                    shard.grad.view(-1).sum()
                    / grads[shard.name].reshape(-1)[shard.start : shard.end].sum()
                ).item()
                for shard in buffer.shards()
            }
        return result, factors


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_every_layout_tells_what_one_rank_would(ranks, sizes, sharded):
    whole = reference(sizes.get("pp", 1))
    results = ranks(ParallelLayout(**sizes).world_size, admitted, sizes, sharded)

    def norm(words):
        return torch.cat([whole[n].flatten() for n in whole if words(n)]).norm().item()

    groups = {
        "rest": (lambda n: "experts" not in n and n[0] != "e", 1.0),
        "*.experts.*": (lambda n: "experts" in n, 0.25),
        "embedding.*": (lambda n: n[0] == "e", 9),
    }
    for result, factors in results:
        assert result == results[0][0]
        assert result.stepped
        assert result.grad_norm == pytest.approx(norm(lambda _: True), rel=1e-13)
        assert result.zeros == sum(int((grad == 0).sum()) for grad in whole.values())
        for name, (matches, most) in groups.items():
            expected = norm(matches)
            assert result.norms[name] == pytest.approx(expected, rel=1e-13)
            for param, factor in factors.items():
                if matches(param):
                    clipped = min(1.0, most / (expected + 1e-6))
                    assert factor == pytest.approx(clipped, rel=1e-12)
        layers = {by_layer(name) for name in whole}
        assert set(result.statistics) == layers
        for layer, found in result.statistics.items():
            own = torch.cat([g.flatten() for n, g in whole.items() if by_layer(n) == layer])
            assert found.norm == pytest.approx(own.norm().item(), rel=1e-13)
            assert found.largest == own.max().item()
            assert found.zeros == int((own == 0).sum())


def test_names_become_layers():
    names = {
        "layers.3.mixer.qkv.weight": "layers.3",
        "model.layers.12.norm.weight": "model.layers.12",
        "embedding.weight": "embedding",
        "layers.weight": "layers",
        "norm": "norm",
    }
    assert {name: by_layer(name) for name in names} == names


def one_rank(**config):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    state = ParallelState(ParallelLayout())
    return model, build_optimizer(model, OptimizerConfig(lr=1e-2, **config), state)


def test_a_missing_gradient_is_all_zeros():
    model, optimizer = one_rank(count_zeros=True)
    model[0].weight.grad = torch.tensor([[1.0, 0, 0, 2]] * 3).double()
    assert optimizer.step().zeros == 6 + 3 + 6 + 2


def test_nothing_is_counted_or_described_unasked():
    _, optimizer = one_rank()
    result = optimizer.step()
    assert (result.zeros, result.statistics, result.norms) == (None, {}, {})


def few_elements():
    """Fewer than ranks have room for, so that some step nothing."""
    with ParallelState(ParallelLayout(dp=4)) as state:
        params = {"layers.0.bias": nn.Parameter(torch.zeros(3, dtype=torch.float64))}
        config = OptimizerConfig(lr=1e-2, statistics="layer")
        with GradBuffer(params.items(), group=Reduction(shards=state.group("dp"))) as buffer:
            optimizer = DistributedOptimizer(
                buffer, lambda shards: build_optimizer(shards, config, state)
            )
            buffer.start(1)
            (params["layers.0.bias"] * torch.tensor([0.0, 1.0, -1.0])).sum().backward()
            buffer.finish()
            return optimizer.step()


def test_ranks_that_step_nothing_add_no_group(ranks):
    for result in ranks(4, few_elements):
        assert list(result.statistics) == ["layers.0"]
        found = result.statistics["layers.0"]
        assert (found.norm, found.largest, found.zeros) == (pytest.approx(4 * 2**0.5), 4.0, 1)


def test_statistics_are_of_the_gradient_without_the_loss_scale():
    model, optimizer = one_rank(loss_scale=1024.0, statistics=lambda name: name)
    model[0].bias.grad = torch.tensor([3.0, 0.0, -4.0]).double() * 1024
    found = optimizer.step().statistics["0.bias"]
    assert (found.norm, found.largest, found.zeros) == (5.0, 4.0, 1)


def test_a_step_above_the_threshold_names_the_largest_gradients():
    model, optimizer = one_rank(skip_above=1.0, loss_scale=2.0)
    model[0].bias.grad = torch.tensor([3.0, 0.0, -4.0]).double() * 2
    model[1].bias.grad = torch.tensor([0.5, 0.0]).double() * 2
    result = optimizer.step()
    assert not result.stepped
    assert result.is_finite
    assert [(bad.rank, bad.name, bad.what, bad.largest) for bad in result.bad] == [
        (0, "0.bias", "large", 4.0),
        (0, "1.bias", "large", 0.5),
    ]
    assert result.why_skipped().startswith("step 1: gradient norm 5.02")
    assert "loss scale 2: rank 0 0.bias large (4)" in result.why_skipped()


def test_a_report_is_bounded_and_says_how_many_more_there_are():
    model = nn.ParameterDict({f"w{i}": nn.Parameter(torch.zeros(1)) for i in range(50)})
    state = ParallelState(ParallelLayout())
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2), state)
    for param in model.values():
        param.grad = torch.tensor([math.nan])
    result = optimizer.step()
    assert result.num_bad == 50
    assert len(result.bad) == 8
    assert result.why_skipped().endswith("and 47 more")


def waits(monkeypatch, optimizer):
    """Count what makes the host wait for the device in a step."""
    count = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        real = getattr(torch.Tensor, name)

        def counted(self, *args, real=real):
            count.append(1)
            return real(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    optimizer.step()
    monkeypatch.undo()
    return len(count)


def test_names_are_looked_for_only_when_a_step_is_not_taken(monkeypatch):
    model, plain = one_rank()
    model[0].bias.grad = torch.ones(3).double()
    assert waits(monkeypatch, plain) == 1
    assert waits(monkeypatch, one_rank(statistics="layer", count_zeros=True)[1]) == 1
    model[0].bias.grad[0] = math.inf
    assert waits(monkeypatch, plain) > 1


def test_norm_groups_that_contradict_each_other_are_named():
    groups = (NormGroup(names="0.*", max_norm=1.0), NormGroup(names="*.bias", max_norm=1.0))
    with pytest.raises(ValueError, match=r"'0.bias' is in the norm groups 0.\* and \*.bias"):
        one_rank(norm_groups=groups)
    with pytest.raises(ValueError, match="norm_groups has 'a' twice"):
        GradLimits(norm_groups=(NormGroup(names="a", max_norm=1.0),) * 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_norm": 1.0}, ValueError, "needs names"),
        ({"names": "a", "max_norm": 0.0}, ValueError, "max_norm must be positive"),
        ({"names": 3, "max_norm": 1.0}, TypeError, "names must be"),
        ({"where": 3, "max_norm": 1.0}, TypeError, "where must be a function"),
    ],
)
def test_a_norm_group_says_what_is_wrong_with_it(options, error, message):
    with pytest.raises(error, match=message):
        NormGroup(**options)


def test_a_skipped_step_leaves_rates_as_they_were():
    model, optimizer = one_rank(skip_above=1.0)
    model[0].bias.grad = torch.full((3,), 5.0).double()
    assert not optimizer.step(lr=1.0, weight_decay=0.5).stepped
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2]


def test_a_guard_and_hand_made_steps_agree():
    """Measure, clip and step by hand with one seed, and by a guard with another order."""
    draw = random.Random(0)
    for _ in range(5):
        limit = draw.uniform(0.1, 5.0)
        model, optimizer = one_rank(max_norm=limit)
        twin = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
        twin.load_state_dict(model.state_dict())
        by_hand = AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0)
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), limit)
        optimizer.step()
        by_hand.step()
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=0)


@pytest.mark.parametrize("world", [1, 2])
def test_what_ranks_agree_on_travels_with_the_norm(ranks, world):
    """One message for both; the step that follows is the one without it, bit for bit."""

    def body():
        def trained(*, measures):
            torch.manual_seed(3)
            model = nn.Linear(5, 3)
            with ParallelState(ParallelLayout(dp=world)) as state:
                group = Reduction(shards=state.group("dp")) if world > 1 else None
                with GradBuffer(model.named_parameters(), group=group) as buffer:
                    config = OptimizerConfig(lr=0.1, max_norm=0.01)
                    optimizer = DistributedOptimizer(
                        buffer, lambda shards: build_optimizer(shards, config, state)
                    )
                    buffer.start(num_backwards=1)
                    model(torch.full((2, 5), 1.0 + state.rank)).sum().backward()
                    buffer.finish()
                    calls = []
                    real = dist.all_reduce
                    dist.all_reduce = lambda *args, **rest: calls.append(1) or real(*args, **rest)
                    sums = []
                    try:
                        if measures:
                            own = torch.tensor([1.0 + state.rank, 0.5])
                            sums = optimizer.measure(own)
                        result = optimizer.step()
                    finally:
                        dist.all_reduce = real
                    again = optimizer.step()  # measured anew
                    return (
                        [p.detach().clone() for p in model.parameters()],
                        (result.grad_norm, again.grad_norm, len(calls), sums),
                    )

        plain, (norm, again, messages, _) = trained(measures=False)
        measured, found = trained(measures=True)
        assert all(torch.equal(one, other) for one, other in zip(plain, measured, strict=True))
        assert found == (norm, again, messages, [sum(range(1, world + 1)), 0.5 * world])
        assert messages == int(world > 1)
        assert norm != again  # the first was clipped in place

    if world == 1:
        body()
    else:
        ranks(world, body)


def test_numbers_cannot_travel_with_a_norm_that_nobody_measures():
    model = nn.Linear(2, 2)
    with GradBuffer(model.named_parameters(), group=None) as buffer:
        optimizer = DistributedOptimizer(buffer, lambda shards: AdamW(shards, lr=0.1))
        buffer.start(num_backwards=1)
        model(torch.ones(1, 2)).sum().backward()
        buffer.finish()
        with pytest.raises(
            RuntimeError, match="no guard to measure gradients; make it by build_op"
        ):
            optimizer.measure(torch.zeros(1))
