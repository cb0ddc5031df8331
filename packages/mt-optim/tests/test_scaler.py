import copy
import math
import random

import pytest
import torch
from mt_data_parallel import GradBuffer
from mt_optim import (
    AdamW,
    LossScale,
    OptimizerConfig,
    ScaleState,
    build_optimizer,
    default_decay_filter,
)
from mt_optim.gradients.scaler import GradScaler, read_scale
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn


def reference(overflows, scale, interval, hysteresis, floor):
    """The rule of the field, written as its papers and programs tell it."""
    seen, tracker, scales = 0, hysteresis, []
    for overflow in overflows:
        if overflow:
            seen = 0
            tracker -= 1
            if tracker <= 0:
                scale = max(scale * 0.5, floor)
        else:
            seen += 1
            if seen == interval:
                seen, tracker = 0, hysteresis
                scale *= 2.0
        scales.append(scale)
    return scales


@pytest.mark.parametrize("seed", range(20))
def test_a_dynamic_scale_follows_the_reference_trajectory(seed):
    draw = random.Random(seed)
    interval, hysteresis = draw.randint(1, 6), draw.randint(1, 4)
    overflows = [draw.random() < draw.choice((0.1, 0.5)) for _ in range(100)]
    floor = draw.choice((1.0, 2.0**-4, 64.0))
    start = floor * 2.0 ** draw.randint(0, 10)
    scaler = GradScaler(
        LossScale(initial=start, growth_interval=interval, hysteresis=hysteresis, minimum=floor)
    )
    expected = reference(overflows, start, interval, hysteresis, floor)
    for number, (overflow, scale) in enumerate(zip(overflows, expected, strict=True)):
        scaler.update(overflow=overflow)
        assert scaler.scale == scale
        if number == 50:  # goes on from what was saved
            saved = scaler.state_dict()
            scaler = GradScaler(scaler.how)
            scaler.restore(read_scale(saved))


def test_the_defaults_are_those_of_the_field():
    scaler = GradScaler(LossScale())
    assert scaler.scale == 2.0**32
    scaler.update(overflow=True)
    assert scaler.scale == 2.0**32
    scaler.update(overflow=True)
    scaler.update(overflow=True)
    assert scaler.scale == 2.0**30  # spent hysteresis is not given back by a lower scale
    for _ in range(1000):
        scaler.update(overflow=False)
    assert scaler.scale == 2.0**31
    scaler.update(overflow=True)
    assert scaler.scale == 2.0**31  # but by a higher one it is


def test_a_constant_scale_never_changes_and_a_dynamic_one_stays_a_number():
    constant = GradScaler(LossScale.of(3.0))
    constant.update(overflow=True)
    constant.restore(ScaleState(scale=8.0, left=1))
    assert constant.scale == 3.0
    huge = GradScaler(LossScale(initial=2.0**127, growth_interval=1))
    huge.update(overflow=False)
    assert torch.tensor(huge.scale, dtype=torch.float32).isfinite()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"initial": 0.0}, ValueError, "initial must be positive"),
        ({"initial": math.nan}, ValueError, "initial must be positive"),
        ({"initial": "x"}, TypeError, "initial must be a number"),
        ({"initial": 1.0, "minimum": 2.0}, ValueError, "initial 1.0 is below minimum 2.0"),
        ({"growth_interval": 0}, ValueError, "growth_interval must be 1 or more"),
        ({"hysteresis": 1.5}, TypeError, "hysteresis must be a whole number"),
    ],
)
def test_settings_out_of_range_are_named(options, error, message):
    with pytest.raises(error, match=message):
        LossScale(**options)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("fixed", ValueError, "loss_scale must be 'dynamic', a number or None; got 'fixed'"),
        (-1.0, ValueError, "loss_scale must be positive"),
        (2.0**128, ValueError, "at most 2\\^127"),
        ([], TypeError, "loss_scale must be a number"),
        (True, TypeError, "loss_scale must be a number"),
    ],
)
def test_what_is_no_loss_scale_is_named(given, error, message):
    with pytest.raises(error, match=message):
        OptimizerConfig(lr=1e-3, loss_scale=given)


def test_a_state_of_something_else_is_refused():
    for bad, error in (
        ({"scale": 1.0}, ValueError),
        ({"scale": -1.0, "clean": 0, "left": 1}, ValueError),
        ({"scale": 1.0, "clean": 0.5, "left": 1}, TypeError),
        ([], TypeError),
    ):
        with pytest.raises(error):
            read_scale(bad)


def make_model(dtype, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def rows(step, dtype):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64).to(dtype)


def train(dtype, steps=6, *, start=0, model=None, optimizer=None, **options):
    model = model or make_model(dtype)
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, **options)
    optimizer = optimizer or build_optimizer(model, config, ParallelState(ParallelLayout()))
    results = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = model(rows(step, dtype)).double().square().mean()
        (loss * optimizer.loss_scale).backward()
        results.append(optimizer.step())
    return model, optimizer, results


def test_a_power_of_two_changes_no_bit_in_fp64():
    plain, _, expected = train(torch.float64, max_norm=0.05, max_value=0.01)
    scaled, _, results = train(torch.float64, max_norm=0.05, max_value=0.01, loss_scale=2.0**20)
    assert [r.grad_norm for r in results] == [r.grad_norm for r in expected]
    assert {r.loss_scale for r in results} == {2.0**20}
    for ours, theirs in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_fp16_parameters_are_their_fp32_masters_rounded():
    """Compare with AdamW in fp32 with the same gradients."""
    model = make_model(torch.float16)
    wide = make_model(torch.float16).float()
    reference = AdamW(
        wide.named_parameters(), lr=1e-2, weight_decay=0.1, decay_filter=default_decay_filter
    )
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, loss_scale=1024.0)
    optimizer = build_optimizer(model, config, ParallelState(ParallelLayout()))
    for step in range(5):
        optimizer.zero_grad()
        (model(rows(step, torch.float16)).float().square().mean() * 1024.0).backward()
        for own, other in zip(model.parameters(), wide.parameters(), strict=True):
            other.grad = own.grad.float() / 1024.0
        assert optimizer.step().stepped
        reference.step()
    for (name, own), other in zip(model.named_parameters(), wide.parameters(), strict=True):
        assert torch.equal(optimizer.master(name), other)
        assert torch.equal(own, other.half())


def test_gradients_too_small_for_fp16_arrive_with_a_scale_and_vanish_without():
    def gradient(scale):
        model = nn.Linear(4, 1, bias=False).half()
        optimizer = build_optimizer(
            model,
            OptimizerConfig(lr=1e-2, loss_scale=scale),
            ParallelState(ParallelLayout()),
        )
        x = torch.full((1, 4), 0.5).half()
        (model(x).float().sum() * 1e-9 * optimizer.loss_scale).backward()
        return optimizer.step().grad_norm

    assert gradient(1.0) == 0.0
    assert gradient(2.0**16) == pytest.approx(1e-9, rel=1e-2)  # in .grad, which is fp16


@pytest.mark.parametrize("buffered", [False, True])
def test_an_overflow_is_skipped_and_the_scale_goes_down_until_it_fits(buffered):
    model = make_model(torch.float16)
    state = ParallelState(ParallelLayout())
    how = LossScale(growth_interval=4, hysteresis=2)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2, loss_scale=how), state)
    overflows, scales = [], []
    buffer = GradBuffer(model.named_parameters(), group=None) if buffered else None
    for step in range(60):
        before = [p.detach().clone() for p in model.parameters()]
        if buffer is None:
            optimizer.zero_grad()
        else:
            buffer.start(1)
        (model(rows(step, torch.float16)).float().square().mean() * optimizer.loss_scale).backward()
        if buffer is not None:
            buffer.finish()
        scales.append(optimizer.loss_scale)
        result = optimizer.step()
        assert result.loss_scale == scales[-1]
        overflows.append(not result.stepped)
        changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert any(changed) == result.stepped
        assert result.stepped == (not result.bad)
    assert scales[1:] == reference(overflows, 2.0**32, 4, 2, 1.0)[:-1]
    assert True in overflows
    assert False in overflows
    assert optimizer.step_count == overflows.count(False)
    if buffer is not None:
        buffer.close()


def test_a_state_dict_carries_the_scale():
    options = {"loss_scale": LossScale(initial=2.0**10, growth_interval=4)}
    model, optimizer, _ = train(torch.float16, 6, **options)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["loss_scale"] == {"scale": 2.0**11, "clean": 2, "left": 2}
    train(torch.float16, 6, start=6, model=model, optimizer=optimizer)
    other, resumed, _ = train(torch.float16, 1, model=make_model(torch.float16, 9), **options)
    resumed.load_state_dict(saved)
    train(torch.float16, 6, start=6, model=other, optimizer=resumed)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert resumed.scaler.state == optimizer.scaler.state


def test_fp16_without_a_scale_and_a_scale_without_fp16_are_refused():
    state = ParallelState(ParallelLayout())
    with pytest.raises(ValueError, match=r"'0.weight' is fp16 and loss_scale is None: .*'dynamic'"):
        build_optimizer(make_model(torch.float16), OptimizerConfig(lr=1e-3), state)
    with pytest.raises(ValueError, match=r"'0.weight' is bf16, .* loss_scale is 'dynamic'"):
        build_optimizer(
            make_model(torch.bfloat16), OptimizerConfig(lr=1e-3, loss_scale="dynamic"), state
        )
