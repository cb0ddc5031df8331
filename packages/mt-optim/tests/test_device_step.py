"""A step that the device takes alone has the bits of one that the host decides on."""

import math

import pytest
import torch
from mt_data_parallel import shard
from mt_optim import (
    DeviceStep,
    DistributedOptimizer,
    LossScale,
    LRSchedule,
    NormGroup,
    OptimizerConfig,
    WeightDecaySchedule,
    build_optimizer,
    device_step_obstacle,
    is_hidden_matrix,
)
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STEPS, ROWS = 12, 8
LR = LRSchedule(max_lr=0.02, warmup=3, decay=STEPS)
DECAY = WeightDecaySchedule(start=0.1, end=0.4, length=STEPS)
NORMS = (NormGroup(names="2.*", max_norm=0.02),)
CASES = {
    "plain": {},
    "bf16": {"dtype": torch.bfloat16, "ema": 0.9},
    "fp64": {"dtype": torch.float64},
    "fp16": {
        "dtype": torch.float16,
        "loss_scale": LossScale(initial=2.0**18, growth_interval=3, hysteresis=1),
    },
    "fp16 gradients": {
        "dtype": torch.float16,
        "grad_dtype": torch.float16,
        "loss_scale": LossScale(initial=2.0**8, hysteresis=1),
    },
    "remainder": {"dtype": torch.bfloat16, "masters": "remainder", "moments_dtype": "bf16"},
    "fp8 moments": {"moments_dtype": "fp8"},
    "clipped alone": {"norm_groups": NORMS, "max_value": 0.01, "statistics": "layer"},
    "skipped": {"skip_above": 2.4, "count_zeros": True, "ema": 0.99},
}


def make(state, strategy="none", dtype=torch.float32, grad_dtype=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)).to(dtype)
    group = state.group("dp")
    buffer = shard(model, strategy, group=group, bucket_size=100, prefetch=0, grad_dtype=grad_dtype)
    config = OptimizerConfig(lr=0.02, **{"max_norm": 0.05, "weight_decay": 0.1} | options)
    optimizer = DistributedOptimizer(buffer, lambda shards: build_optimizer(shards, config, state))
    return model, buffer, optimizer


def losses(model, buffer, state, step, poison):
    """Run the passes of a step; return the loss on the device."""
    generator = torch.Generator().manual_seed(step)
    param = next(model.parameters())
    rows = torch.randn(ROWS, 6, generator=generator).to(param).chunk(state.size("dp"))[state.rank]
    buffer.start(1)
    loss = model(rows * (1.0 + 3.0 * (step % 4 == 1))).square().sum() / ROWS
    return loss * (math.inf if step == poison and state.rank == 0 else 1.0)


def run(state, *, alone, poison=None, strategy="none", **options):
    """Train, and return what was told and what is left."""
    model, buffer, optimizer = make(state, strategy, **options)
    step_alone, told = DeviceStep(optimizer) if alone else None, []
    for step in range(STEPS):
        loss = losses(model, buffer, state, step, poison)
        (loss * optimizer.loss_scale).backward()
        buffer.finish()
        rates = {"lr": LR.at(step + 1), "weight_decay": DECAY.at(step + 1)}
        also = torch.tensor([float(step), 1.0], dtype=torch.float64)
        if step_alone is None:
            sums = optimizer.measure(also)
            result = optimizer.step(**rates)
        else:
            numbers = torch.tensor(step_alone.numbers(**rates), dtype=torch.float64)
            sums, result = step_alone.read(step_alone(numbers, also))
        told.append((sums, repr(result), optimizer.loss_scale))
    inner = optimizer.inner
    left = {name: x.detach().clone() for name, x in model.named_parameters()}
    for name in inner.names:
        left |= {
            f"{key} of {name}": x.clone() for key, x in inner.state[inner.shard(name).param].items()
        }
    rates = [(group["lr"], group["weight_decay"]) for group in inner.param_groups]
    buffer.close()
    return told, left, rates


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.equal(*(x.flatten().view(torch.uint8) for x in (found[1][name], value))), name
    assert found[2] == expected[2]


@pytest.mark.parametrize("case", CASES)
def test_it_has_the_bits_of_a_step_with_the_host(case) -> None:
    with ParallelState(ParallelLayout()) as state:
        expected = run(state, alone=False, **CASES[case])
        assert_same(run(state, alone=True, **CASES[case]), expected)
    if case in ("fp16", "skipped"):
        assert "stepped=False" in str(expected[0])
        assert "stepped=True" in str(expected[0])


@pytest.mark.parametrize("case", ["plain", "bf16"])
def test_a_gradient_that_is_not_finite_changes_nothing(case) -> None:
    with ParallelState(ParallelLayout()) as state:
        expected = run(state, alone=False, poison=5, **CASES[case])
        found = run(state, alone=True, poison=5, **CASES[case])
    assert_same(found, expected)
    assert "stepped=False, step=6" in expected[0][5][1]
    assert "what" not in expected[0][4][1]


def _ranks_agree(strategy: str) -> None:
    for options in (CASES["bf16"], CASES["clipped alone"]):
        with ParallelState(ParallelLayout(dp=2)) as state:
            expected = run(state, alone=False, poison=5, strategy=strategy, **options)
            assert_same(run(state, alone=True, poison=5, strategy=strategy, **options), expected)


@pytest.mark.parametrize("strategy", ["none", "optimizer"])
def test_ranks_have_the_bits_of_steps_with_the_host(ranks, strategy) -> None:
    ranks(2, _ranks_agree, strategy)


def test_a_loss_that_is_not_finite_keeps_the_step_from_being_taken() -> None:
    with ParallelState(ParallelLayout()) as state:
        model, buffer, optimizer = make(state)
        step = DeviceStep(optimizer)
        losses(model, buffer, state, 0, None).backward()
        buffer.finish()
        before = [x.detach().clone() for x in model.parameters()]
        numbers = torch.tensor(step.numbers(), dtype=torch.float64)
        sums, result = step.read(step(numbers, torch.tensor([math.nan])))
        assert math.isnan(sums[0])
        assert not result.stepped
        assert all(map(torch.equal, model.parameters(), before))
        buffer.close()


class _Watch(TorchDispatchMode):
    """Counts reads by the host, and notes operations with the numbers and memory they are given."""

    def __init__(self):
        super().__init__()
        self.reads, self.seen = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += torch.Tag.data_dependent_output in func.tags
        numbers = [x for x in tree_leaves((args, kwargs)) if isinstance(x, bool | int | float)]
        self.seen.append((str(func), numbers))
        return func(*args, **(kwargs or {}))


def test_the_device_is_given_the_same_operations_and_numbers_for_each_step() -> None:
    with ParallelState(ParallelLayout()) as state:
        model, buffer, optimizer = make(state, skip_above=4.0)
        step, seen, results = DeviceStep(optimizer), [], []
        for number in range(6):
            losses(model, buffer, state, number, 4).backward()
            buffer.finish()
            rates = step.numbers(lr=LR.at(number + 1), weight_decay=DECAY.at(number + 1))
            numbers, also = torch.tensor(rates, dtype=torch.float64), torch.ones(1)
            addresses = {name: x.data_ptr() for name, x in step.tensors.items()}
            with _Watch() as watch:
                found = step(numbers, also)
            assert {name: x.data_ptr() for name, x in step.tensors.items()} == addresses
            assert watch.reads == 0
            seen.append(watch.seen)
            results.append(step.read(found)[1])
        assert {result.stepped for result in results} == {True, False}
        assert all(one == seen[0] for one in seen)
        buffer.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"name": "lion"}, "lion has its rate as a number of Python"),
        ({"name": "adam"}, "adam adds weight decay"),
        ({"offload": 0.5}, "offload has the host step a share"),
    ],
)
def test_what_the_host_has_to_do_is_said(options, told) -> None:
    with ParallelState(ParallelLayout()) as state:
        _, buffer, optimizer = make(state, **options)
        assert told in (device_step_obstacle(optimizer) or "")
        with pytest.raises(ValueError, match=told):
            DeviceStep(optimizer)
        buffer.close()


def test_what_else_keeps_it_from_running_alone_is_said() -> None:
    with ParallelState(ParallelLayout()) as state:
        _, buffer, optimizer = make(state, name="muon")
        assert any(is_hidden_matrix(piece.name, piece.source) for piece in optimizer.shards)
        assert "muon has its rate" in (device_step_obstacle(optimizer) or "")
        buffer.close()
        _, buffer, optimizer = make(state)
        assert device_step_obstacle(optimizer) is None
        optimizer.inner.rescale = dict
        assert "QK-clip" in (device_step_obstacle(optimizer) or "")
        optimizer.inner.guard = None
        assert "no guard" in (device_step_obstacle(optimizer) or "")
        buffer.close()
    with pytest.raises(TypeError, match="DistributedOptimizer"):
        DeviceStep(None)
