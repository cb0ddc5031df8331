"""Groups by name, attribute and function, and schedules that keep their proportions."""

import pytest
import torch
from mt_optim import (
    AdamW,
    GroupOverride,
    LRSchedule,
    OptimizerConfig,
    WeightDecaySchedule,
    build_optimizer,
    default_decay_filter,
    is_hidden_matrix,
    mup_overrides,
    override_groups,
)
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn

STATE = ParallelState(ParallelLayout())


def make_model():
    torch.manual_seed(0)
    parts = {"embedding": nn.Linear(4, 8), "up": nn.Linear(8, 8), "head": nn.Linear(8, 2)}
    return nn.ModuleDict(parts).double()


def forward(model, x):
    return model["head"](model["up"](model["embedding"](x)).tanh())


def train(model, optimizer, rates):
    for step, options in enumerate(rates):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        forward(model, x).square().sum().backward()
        optimizer.step(**options)


def test_overrides_make_the_groups_of_torch():
    ours, theirs = make_model(), make_model()
    ours["up"].bias.is_slow = True
    overrides = (
        GroupOverride(names="embedding.*", lr_scale=0.1),
        GroupOverride(names="head.*", lr_scale=0.5, wd_scale=3.0),
        GroupOverride(attribute="is_slow", lr_scale=0.0),
    )
    config = OptimizerConfig(lr=0.01, weight_decay=0.2, overrides=overrides)
    schedule = LRSchedule(max_lr=0.01, warmup=2, decay=12)
    decay = WeightDecaySchedule(start=0.1, end=0.3, length=8)
    rates = [{"lr": schedule.at(n), "weight_decay": decay.at(n)} for n in range(1, 11)]
    train(ours, build_optimizer(ours, config, STATE), rates)

    scales = {"embedding": (0.1, 1.0), "up": (1.0, 1.0), "head": (0.5, 3.0)}
    scaled = [(p, *scales[name.split(".")[0]]) for name, p in theirs.named_parameters()]
    scaled = [(p, lr, wd if p.ndim > 1 else 0.0) for p, lr, wd in scaled]
    scaled[3] = (theirs["up"].bias, 0.0, 0.0)
    reference = torch.optim.AdamW([{"params": [p]} for p, _, _ in scaled], lr=0.01)
    for step, options in enumerate(rates):
        for group, (_, lr, wd) in zip(reference.param_groups, scaled, strict=True):
            group["lr"] = options["lr"] * lr
            group["weight_decay"] = options["weight_decay"] * wd
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        reference.zero_grad()
        forward(theirs, x).square().sum().backward()
        reference.step()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-15)


def test_the_scales_hold_from_the_start_and_for_a_group_given_by_hand():
    model = make_model()
    config = OptimizerConfig(
        lr=0.01, weight_decay=0.2, overrides=(GroupOverride(names="head.w*", lr_scale=0.5),)
    )
    groups = build_optimizer(model, config, STATE).param_groups
    seen = {name: (g["lr"], g["weight_decay"]) for g in groups for name in g["param_names"]}
    assert seen["head.weight"] == (0.005, 0.2)
    assert seen["head.bias"] == (0.01, 0.0)
    optimizer = AdamW([{"params": model.parameters(), "lr_scale": 2.0}], lr=0.1)
    optimizer.step(lr=0.3)
    assert optimizer.param_groups[0]["lr"] == 0.6


def test_spared_parameters_stay_without_decay_under_a_schedule():
    optimizer = AdamW(make_model().named_parameters(), decay_filter=default_decay_filter)
    optimizer.step(weight_decay=0.7)
    decays = {n: g["weight_decay"] for g in optimizer.param_groups for n in g["param_names"]}
    assert (decays["up.weight"], decays["up.bias"]) == (0.7, 0.0)


def test_contradictions_are_errors_and_agreement_is_none():
    named = list(make_model().named_parameters())
    same = GroupOverride(names="*.bias", lr_scale=0.1)
    other = GroupOverride(where=lambda name, _: name.startswith("head"), lr_scale=0.2)
    with pytest.raises(ValueError, match=r"'head.bias' has lr_scale 0.1 from override '\*.bias'"):
        override_groups(named, [same, other])
    agreed = override_groups(named, [same, GroupOverride(names="*", wd_scale=0.0), same])
    assert [len(group["params"]) for group in agreed] == [3, 3]


def test_mup_slows_hidden_matrices_with_the_width():
    groups = override_groups(make_model().named_parameters(), mup_overrides(4, is_hidden_matrix))
    slow = [piece.name for group in groups for piece in group["params"] if "lr_scale" in group]
    assert slow == ["up.weight"]
    assert groups[1]["lr_scale"] == 0.25


def test_weight_decay_schedules_are_the_formulas():
    linear = WeightDecaySchedule(start=0.02, end=0.1, length=1000)
    cosine = WeightDecaySchedule(start=0.02, end=0.1, length=1000, kind="cosine")
    assert [linear.at(n) for n in (0, 250, 1000, 2000)] == pytest.approx([0.02, 0.04, 0.1, 0.1])
    assert [cosine.at(n) for n in (0, 250, 500, 1000)] == pytest.approx(
        [0.02, 0.02 + 0.08 * (1 - 0.5**0.5) / 2, 0.06, 0.1]
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GroupOverride(lr_scale=1.0), "needs names, attribute or where"),
        (lambda: GroupOverride(names="*"), "needs lr_scale or wd_scale"),
        (lambda: GroupOverride(names="*", lr_scale=-1.0), "lr_scale must be 0 or more"),
        (lambda: mup_overrides(0, is_hidden_matrix), "width_multiplier must be positive, got 0"),
        (lambda: WeightDecaySchedule(start=0, end=1, length=0), "length must be positive, got 0"),
        (lambda: WeightDecaySchedule(start=0, end=1, length=1, kind="wsd"), "linear or cosine"),
    ],
)
def test_settings_that_say_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
