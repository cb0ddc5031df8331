"""Moments in fewer bits: stored values, lost precision, and the effect on a run."""

import copy

import pytest
import torch
from mt_optim import NamedOptimizer, OptimizerConfig, StateStorage, build_optimizer
from mt_optim.rules.adamw import AdamWRule
from mt_optim.state.moments import MomentStorage
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn

STATE = ParallelState(ParallelLayout())
# Largest error of a value, relative to it, down to the share of its block's largest that has full
# precision: half a unit in the last place of each format.
ERRORS = {"bf16": (2**-8, 0.0), "fp16": (2**-11, 2**-29), "fp8": (2**-4, 2**-14)}


def values(shape=(40, 33), spread=6.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.exp2(torch.randn(shape, generator=generator) * spread) * 1e-6


def stored(name, x, key="exp_avg"):
    storage = MomentStorage(name)
    state = storage.pack(key, x)
    return storage, state, storage.unpack(key, state, torch.float32)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
def test_the_error_of_a_value_is_that_of_the_format(name):
    x = values(spread=1.0)
    _, state, y = stored(name, x)
    relative, full = ERRORS[name]
    blocks = torch.nn.functional.pad(x.flatten().abs(), (0, -x.numel() % 256)).view(-1, 256)
    largest = blocks.amax(1).repeat_interleave(256)[: x.numel()].view(x.shape)
    precise = x.abs() > largest * full
    assert precise.float().mean() > 0.9
    assert ((y - x).abs() <= relative * x.abs())[precise].all()
    assert ((y - x).abs() <= relative * largest * full)[~precise].all()
    assert state["exp_avg"].element_size() == {"bf16": 2, "fp16": 2, "fp8": 1}[name]


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_what_was_read_is_stored_without_loss(name, key):
    x = values(shape=(1000, 256))
    storage, _, y = stored(name, x.square() if key == "exp_avg_sq" else x, key)
    again = storage.unpack(key, storage.pack(key, y), torch.float32)
    assert torch.equal(again, y)


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_a_small_square_is_kept_from_zero(name):
    x = torch.tensor([1.0, 1e-30, 0.0])
    _, _, square = stored(name, x, "exp_avg_sq")
    _, _, mean = stored(name, x, "exp_avg")
    assert 0 < square[1] < 1e-4
    assert square[2] == 0
    assert mean[1] == 0


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(name, bad):
    _, _, y = stored(name, torch.tensor([1.0, bad]))
    assert not torch.isfinite(y).all()


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 16)).to(dtype)


def train(model, optimizer, first=0, steps=10):
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x.to(model[0].weight.dtype)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp32_moments_of_fp32_masters_are_the_plain_ones(dtype):
    runs = []
    for moments in ("full", "fp32"):
        model = make_model(dtype)
        rule = AdamWRule()
        named = model.named_parameters()
        train(
            model,
            NamedOptimizer(
                named,
                rule,
                lr=1e-2,
                weight_decay=0.1,
                storage=StateStorage(moments_dtype=moments),
            ),
        )
        runs.append(list(model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


@pytest.mark.parametrize(("name", "bound"), [("bf16", 0.02), ("fp16", 0.004), ("fp8", 0.15)])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lion", "sgd"])
def test_a_run_stays_near_the_one_with_full_moments(name, bound, optimizer):
    """The distance of the weights, as a share of how far they went."""
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    ends = []
    for moments in ("full", name):
        model = make_model()
        betas = None if optimizer == "sgd" else (0.9, 0.95)
        config = OptimizerConfig(name=optimizer, lr=1e-3, betas=betas, moments_dtype=moments)
        train(model, build_optimizer(model, config, STATE), steps=20)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    distance = (ends[1] - ends[0]).norm() / (ends[0] - start).norm()
    # The sign of Lion turns where a moment is near zero, and each such element goes two steps.
    assert 0 < distance < (3 * bound if optimizer == "lion" else bound)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("by", ["state dict", "moments"])
def test_a_run_resumes_bit_equal(name, by):
    config = OptimizerConfig(lr=1e-2, moments_dtype=name)
    straight = make_model(torch.bfloat16)
    optimizer = build_optimizer(straight, config, STATE)
    train(straight, optimizer, steps=4)
    resumed = copy.deepcopy(straight)
    restored = build_optimizer(resumed, config, STATE)
    if by == "state dict":
        restored.load_state_dict(optimizer.state_dict())
    else:
        for key in optimizer.names:
            restored.master(key).copy_(optimizer.master(key))
            for moment in optimizer.moments(key):
                restored.set_moment(key, moment, optimizer.moment(key, moment))
        restored.step_count = optimizer.step_count
        restored.sync_params()
    assert train(straight, optimizer, first=4) == train(resumed, restored, first=4)
    for key in optimizer.names:
        assert torch.equal(optimizer.master(key), restored.master(key))


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
def test_moments_take_the_memory_they_say(name):
    model = make_model()
    optimizer = build_optimizer(model, OptimizerConfig(lr=1.0, moments_dtype=name), STATE)
    count = sum(p.numel() for p in model.parameters())
    size = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    )
    bits = {"bf16": 16.0, "fp16": 16.125, "fp8": 8.125}[name]
    assert size * 8 / count / 2 == pytest.approx(bits, rel=0.02)


def test_a_moment_that_is_not_finite_is_named():
    model = make_model()
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3, moments_dtype="fp8"), STATE)
    train(model, optimizer, steps=1)
    assert optimizer.non_finite() == []
    moment = optimizer.moment("0.bias", "exp_avg")
    moment[3] = float("inf")
    assert optimizer.non_finite() == []  # a copy
    optimizer.set_moment("0.bias", "exp_avg", moment)
    assert optimizer.non_finite() == ["0.bias"]


def test_settings_that_can_not_work_say_why():
    with pytest.raises(ValueError, match="moments_dtype must be one of full, fp32, bf16"):
        OptimizerConfig(lr=1.0, moments_dtype="int8")
    with pytest.raises(ValueError, match=r"moments_dtype 'fp8' is not for classes of torch"):
        OptimizerConfig(lr=1.0, name="torch.optim.RAdam", moments_dtype="fp8")
    optimizer = build_optimizer(make_model(), OptimizerConfig(lr=1.0), STATE)
    with pytest.raises(ValueError, match=r"exp_avg of parameter '0.bias' has shape \(40,\), got"):
        optimizer.set_moment("0.bias", "exp_avg", torch.zeros(2))
