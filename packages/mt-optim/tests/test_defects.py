"""Defects that optimizers of other frameworks had; docs/mt-optim.md has the whole list."""

import copy
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from mt_data_parallel import GradBuffer, Reduction
from mt_optim import (
    DistributedOptimizer,
    GroupOverride,
    LRSchedule,
    NormGroup,
    OptimizerConfig,
    Orthogonalization,
    build_optimizer,
    is_hidden_matrix,
)
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn

STATE = ParallelState(ParallelLayout())


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 70), nn.Tanh(), nn.LayerNorm(70), nn.Linear(70, 3)]
    return nn.Sequential(*layers).to(dtype)


def trained(config, steps=3):
    """The weights and moments after a few steps."""
    model = make_model()
    optimizer = build_optimizer(model, config, STATE)
    for step in range(steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    tensors = [*model.parameters()]
    for name in optimizer.names:
        tensors += [optimizer.moment(name, key) for key in optimizer.moments(name)]
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


# Each field: settings that read it, and another value of it.
EFFECTS = {
    "name": ({}, "adam"),
    "lr": ({}, 0.02),
    "weight_decay": ({}, 0.3),
    "betas": ({}, (0.8, 0.9)),
    "eps": ({}, 1e-3),
    "momentum": ({"name": "sgd"}, 0.5),
    "nesterov": ({"name": "sgd"}, True),
    "orthogonalization": ({"name": "muon"}, Orthogonalization(scale="unit_rms_norm")),
    "moments_dtype": ({}, "bf16"),
    "overrides": ({}, (GroupOverride(names="0.*", lr_scale=0.1),)),
    "options": ({"name": "torch.optim.RMSprop"}, {"alpha": 0.5}),
    "max_norm": ({}, 0.01),
    "max_value": ({}, 0.01),
    "skip_above": ({}, 1e-3),
    "norm_groups": ({}, (NormGroup(names="0.*", max_norm=0.01),)),
    "soap_frequency": ({"name": "soap"}, 1),
    "soap_max_dim": ({"name": "soap"}, 6),
}
# These say where and how the same numbers are kept, or what is told of them; each has its tests.
SAME_NUMBERS = {
    *("masters", "offload", "offload_dir", "ema", "loss_scale", "count_zeros", "statistics"),
}


@pytest.mark.parametrize("field", EFFECTS)
def test_every_field_of_the_configuration_has_an_effect(field):
    # Megatron-LM: use_torch_optimizer_for_cpu_offload was overwritten right after it was applied.
    settings, value = EFFECTS[field]
    config = OptimizerConfig(**{"lr": 0.01, "weight_decay": 0.1, **settings})
    assert getattr(config, field) != value
    before, after = trained(config), trained(dataclasses.replace(config, **{field: value}))
    assert before.shape != after.shape or not torch.equal(before, after)


def test_every_field_is_tried():
    fields = {item.name for item in dataclasses.fields(OptimizerConfig)}
    assert fields == EFFECTS.keys() | SAME_NUMBERS


@pytest.mark.parametrize(
    ("what", "value", "name"),
    [
        ("betas", (0.8, 0.9), "sgd"),
        ("betas", (0.8, 0.9), "torch.optim.RAdam"),
        ("momentum", 0.5, "adamw"),
        ("momentum", 0.5, "lion"),
        ("nesterov", True, "soap"),
        ("nesterov", False, "adam"),
    ],
)
def test_a_setting_that_the_optimizer_does_not_read_is_refused(what, value, name):
    with pytest.raises(ValueError, match=rf"{what} .* does not go with name '{name}'; leave it"):
        OptimizerConfig(name=name, lr=0.01, **{what: value})


def test_a_saved_schedule_is_set_and_never_added():
    # Megatron-LM: load_state_dict of the scheduler added the saved number of steps.
    config = OptimizerConfig(lr=0.01, weight_decay=0.1)
    model = make_model()
    optimizer = build_optimizer(model, config, STATE)
    schedule = LRSchedule(kind="wsd", max_lr=0.01, warmup=2, decay=20, wsd_anneal=10)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 5, dtype=torch.float64)).square().sum().backward()
        optimizer.step(lr=schedule.at(optimizer.step_count + 1), weight_decay=0.2)

    for _ in range(15):
        step()
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    for _ in range(2):  # loading twice is loading once
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert optimizer.step_count == 15
        step()
        assert optimizer.step_count == 16
        decayed = [group for group in optimizer.param_groups if group.get("wd_scale", 1.0)]
        assert [group["weight_decay"] for group in decayed] == [0.2] * len(decayed)
        assert {group["lr"] for group in optimizer.param_groups} == {schedule.at(16)}


def test_a_buffer_names_its_group_and_never_falls_back_to_a_global_one():
    # Megatron-LM: without a collection of groups it called a function that does not exist.
    parameter = inspect.signature(GradBuffer).parameters["group"]
    assert parameter.default is inspect.Parameter.empty
    with pytest.raises(TypeError, match="group"):
        GradBuffer(make_model().named_parameters())  # pyright: ignore[reportCallIssue]


def two_buffers():
    """Train two models at once, one of them sharded and with buckets of another size."""
    with ParallelState(ParallelLayout(dp=2)) as state:
        first, second = make_model(), make_model()
        shards = Reduction(shards=state.group("dp"))
        config = OptimizerConfig(lr=0.01, weight_decay=0.1, max_norm=0.5)
        with (
            GradBuffer(first.named_parameters(), group=state.group("dp")) as one,
            GradBuffer(second.named_parameters(), group=shards, bucket_size=50) as other,
        ):
            pairs = [
                (
                    model,
                    buffer,
                    DistributedOptimizer(buffer, lambda p: build_optimizer(p, config, state)),
                )
                for model, buffer in ((first, one), (second, other))
            ]
            for step in range(5):
                x = torch.full((2, 5), step + state.rank, dtype=torch.float64)
                for _, buffer, _ in pairs:
                    buffer.start(1)
                sum(model(x).square().sum() for model, _, _ in pairs).backward()
                for _, buffer, _ in reversed(pairs):
                    buffer.finish()
                for _, _, optimizer in pairs:
                    optimizer.step()
        return [param.detach().clone() for model in (first, second) for param in model.parameters()]


def test_two_buffers_of_one_process_do_not_disturb_each_other(ranks):
    # Megatron-LM: the function that reduce-scatters was a global that each buffer replaced.
    for params in ranks(2, two_buffers):
        half = len(params) // 2
        for own, other in zip(params[:half], params[half:], strict=True):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def few_matrices():
    """A rank whose part of the model has parameters of some groups only."""
    with ParallelState(ParallelLayout(dp=4)) as state:
        model = make_model()
        group = Reduction(shards=state.group("dp"))
        named = model.named_parameters()
        with GradBuffer(named, group=group, whole=is_hidden_matrix) as buffer:
            config = OptimizerConfig(name="muon", lr=0.01, max_norm=0.5)
            optimizer = DistributedOptimizer(buffer, lambda p: build_optimizer(p, config, state))
            for step in range(3):
                buffer.start(1)
                model(torch.full((2, 5), step + 1.0, dtype=torch.float64)).square().sum().backward()
                buffer.finish()
                optimizer.step(lr=0.01 / (step + 1), weight_decay=0.1)
            keys = optimizer.inner.moment_keys
            count = len(optimizer.inner.param_groups)
        return keys, count, [param.detach().clone() for param in model.parameters()]


def test_ranks_with_parameters_of_other_groups_run_the_same_steps(ranks):
    # Megatron-LM: groups have to be gathered from all ranks to be the same everywhere.
    results = ranks(4, few_matrices)
    assert len({count for _, count, _ in results}) > 1
    for keys, _, params in results:
        assert keys == results[0][0] == ("momentum_buffer", "exp_avg", "exp_avg_sq")
        assert all(torch.equal(*pair) for pair in zip(params, results[0][2], strict=True))


def test_the_list_on_the_page_names_tests_that_are_there():
    root = Path(__file__).parents[3]
    page = (root / "docs" / "mt-optim.md").read_text()
    named = re.findall(r"`(test_\w+)`", page.split("## Defects of others")[1].split("\n## ")[0])
    files = [*root.glob("packages/*/tests/test_*.py"), *root.glob("tests-integration/tests/*.py")]
    defined = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert len(named) > 15
    assert set(named) <= defined
