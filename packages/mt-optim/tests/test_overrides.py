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
)
from mt_optim.parameters.override import override_groups
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


def test_mup_scales_the_hidden_matrices_of_adam_and_what_is_no_matrix_for_sgd():
    hidden, rest = ["up.weight"], ["embedding.weight", "embedding.bias", "up.bias"]
    rest += ["head.weight", "head.bias"]
    for name, keys, scaled, factor in (
        ("adamw", {"lr_scale", "eps_scale"}, hidden, 0.25),
        ("adam", {"lr_scale", "eps_scale"}, hidden, 0.25),
        ("lion", {"lr_scale"}, hidden, 0.25),
        ("sgd", {"lr_scale"}, rest, 4.0),
    ):
        overrides = mup_overrides(4, is_hidden_matrix, name=name)
        groups = override_groups(make_model().named_parameters(), overrides)
        other = [group for group in groups if "lr_scale" in group]
        assert [shard.name for group in other for shard in group["params"]] == scaled
        assert {key: value for key, value in other[0].items() if key != "params"} == (
            dict.fromkeys(keys, factor)
        )
    config = OptimizerConfig(lr=0.1, eps=1e-6, overrides=tuple(mup_overrides(4, is_hidden_matrix)))
    groups = build_optimizer(make_model(), config, STATE).param_groups
    seen = {name: (g["lr"], g["eps"]) for g in groups for name in g["param_names"]}
    assert seen["up.weight"] == (0.025, 2.5e-7)
    assert seen["head.weight"] == (0.1, 1e-6)


class Mup(nn.Module):
    """Two hidden layers in the parametrisation of muP: initial values, and the output's scale."""

    def __init__(self, width, base):
        super().__init__()
        self.embedding, self.head = nn.Linear(8, width), nn.Linear(width, 4, bias=False)
        self.hidden = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.multiplier = base / width
        generator = torch.Generator().manual_seed(0)
        for name, param in self.named_parameters():
            std = width**-0.5 if name.startswith("hidden") else 0.3
            param.data = torch.randn(param.shape, generator=generator) * std

    def forward(self, x):
        x = self.embedding(x).relu()
        for layer in self.hidden:
            x = layer(x).relu()
        return self.head(x) * self.multiplier


# With sgd the hidden matrices need no other rate, so that is told of the rest alone.
@pytest.mark.parametrize(
    ("name", "lr", "trained"), [("adamw", 0.002, "all"), ("sgd", 0.1, "all"), ("sgd", 0.1, "rest")]
)
def test_one_rate_moves_outputs_as_far_at_any_width_under_mup(name, lr, trained):
    """The coordinate check of the paper: how far five steps move the output."""

    def distance(width, *, scaled):
        base = 64
        model = Mup(width, base)
        if trained == "rest":
            model.hidden.requires_grad_(False)
        overrides = mup_overrides(width / base, is_hidden_matrix, name=name) if scaled else []
        config = OptimizerConfig(name=name, lr=lr, overrides=tuple(overrides))
        optimizer = build_optimizer(model, config, STATE)
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        wanted = torch.randn(64, 4, generator=torch.Generator().manual_seed(2))
        before = model(x).detach()
        for _ in range(5):
            optimizer.zero_grad()
            (model(x) * wanted).mean().backward()  # which no step makes any flatter
            optimizer.step()
        return float((model(x) - before).detach().square().mean().sqrt())

    narrow = distance(64, scaled=True)
    assert distance(1024, scaled=True) == pytest.approx(narrow, rel=0.5)
    if (name, trained) != ("sgd", "all"):  # there the hidden matrices move it most
        assert not narrow / 2 < distance(1024, scaled=False) < 2 * narrow


def test_an_override_of_what_a_rule_does_not_have_is_named():
    for setting, text in (
        ({"betas": (0.8, 0.9)}, "sets betas of parameter 'up.weight', which muon steps"),
        ({"eps_scale": 2.0}, "sets eps_scale of parameter 'up.weight', which muon steps"),
    ):
        overrides = (GroupOverride(names="up.*", **setting),)
        with pytest.raises(ValueError, match=text):
            build_optimizer(
                make_model(), OptimizerConfig(name="muon", lr=0.1, overrides=overrides), STATE
            )


def test_a_scale_of_an_eps_that_is_no_number_is_named():
    overrides = (GroupOverride(names="up.*", eps_scale=2.0),)
    config = OptimizerConfig(
        name="torch.optim.Adafactor", lr=0.1, weight_decay=0.0, overrides=overrides
    )
    text = r"eps_scale multiplies eps, and that is \(None, 0.001\), which is no number; leave"
    with pytest.raises(ValueError, match=text):
        build_optimizer(make_model(), config, STATE)


def test_betas_and_eps_of_a_group_are_its_own():
    overrides = (GroupOverride(names="head.*", betas=(0.5, 0.6), eps_scale=10.0),)
    config = OptimizerConfig(lr=0.1, betas=(0.9, 0.95), eps=1e-7, overrides=overrides)
    groups = build_optimizer(make_model(), config, STATE).param_groups
    seen = {name: (g["betas"], g["eps"]) for g in groups for name in g["param_names"]}
    assert seen["head.weight"] == seen["head.bias"] == ((0.5, 0.6), pytest.approx(1e-6))
    assert seen["up.weight"] == ((0.9, 0.95), 1e-7)


def test_a_resumed_step_sets_rates_and_never_adds_to_them():
    """The scheduler of Megatron-LM added the saved count to its own and read decay too late."""
    overrides = (GroupOverride(names="head.*", lr_scale=0.5, wd_scale=2.0),)
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, overrides=overrides)
    schedule = LRSchedule(max_lr=0.01, warmup=3, decay=20)
    decay = WeightDecaySchedule(start=0.1, end=0.3, length=20, kind="cosine")
    rates = [{"lr": schedule.at(n), "weight_decay": decay.at(n)} for n in range(1, 13)]
    straight, resumed = make_model(), make_model()
    optimizer = build_optimizer(straight, config, STATE)
    train(straight, optimizer, rates[:6])
    restored = build_optimizer(resumed, config, STATE)
    for _ in range(2):  # a second time changes nothing
        restored.load_state_dict(optimizer.state_dict())
        resumed.load_state_dict(straight.state_dict())
    assert restored.step_count == 6
    train(straight, optimizer, rates[6:])
    train(resumed, restored, rates[6:])
    assert restored.step_count == 12
    for own, other in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(own, other)
    options = [{k: v for k, v in g.items() if k != "params"} for g in restored.param_groups]
    assert options == [
        {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
    ]


def test_what_a_step_gives_overrides_what_a_state_brought():
    first = build_optimizer(make_model(), OptimizerConfig(lr=0.5, weight_decay=0.4), STATE)
    second = build_optimizer(make_model(), OptimizerConfig(lr=0.1, weight_decay=0.2), STATE)
    second.load_state_dict(first.state_dict())
    assert {group["lr"] for group in second.param_groups} == {0.5}
    second.step(lr=0.1, weight_decay=0.2)
    assert {group["lr"] for group in second.param_groups} == {0.1}
    assert {group["weight_decay"] for group in second.param_groups} == {0.2, 0.0}


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
        (lambda: GroupOverride(names="*"), "needs lr_scale, wd_scale, eps_scale or betas"),
        (lambda: GroupOverride(names="*", betas=(0.9, 1.0)), "betas must be two numbers"),
        (lambda: GroupOverride(names="*", lr_scale=-1.0), "lr_scale must be 0 or more"),
        (lambda: mup_overrides(0, is_hidden_matrix), "width_multiplier must be positive, got 0"),
        (lambda: WeightDecaySchedule(start=0, end=1, length=0), "length must be positive, got 0"),
        (
            lambda: mup_overrides(2, is_hidden_matrix, name="muon"),
            "are those of adamw, adam",
        ),
        (lambda: WeightDecaySchedule(start=0, end=1, length=1, kind="wsd"), "linear or cosine"),
        (
            lambda: WeightDecaySchedule(start=0, end=1, length=1, kind="constant"),
            "'constant' needs end to be start, got 0 and 1",
        ),
    ],
)
def test_settings_that_say_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
