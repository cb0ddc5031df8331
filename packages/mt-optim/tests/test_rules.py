"""Every rule against torch.optim, or against its paper written out, over ten steps."""

import copy
import math

import pytest
import torch
from mt_optim import SGD, AdamW, Lion, NamedOptimizer, OptimizerConfig, build_optimizer
from mt_optim.rules.adamw import AdamWRule
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn

STATE = ParallelState(ParallelLayout())
STEPS = 10


def make_model(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def train(model, optimizer, *, first=0, steps=STEPS):
    results = []
    for step in range(first, first + steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x.to(model[0].weight.dtype)).square().sum().backward()
        results.append(optimizer.step())
    return results


def assert_close_models(ours, theirs, rtol=1e-12):
    for (name, own), (_, other) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=rtol, atol=1e-15, msg=name)


SGD_SETTINGS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
]


@pytest.mark.parametrize("settings", SGD_SETTINGS, ids=lambda s: "-".join(s) or "plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sgd_is_bit_equal_to_torch(settings, dtype):
    ours, theirs = make_model(dtype), make_model(dtype)
    train(ours, SGD(ours.named_parameters(), lr=0.01, **settings))
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.01, foreach=True, **settings))
    assert all(torch.equal(*p) for p in zip(ours.parameters(), theirs.parameters(), strict=True))


def lion(params, moments, lr, betas, weight_decay):
    """The paper's algorithm, element by element."""
    for param, moment in zip(params, moments, strict=True):
        grad = param.grad
        update = torch.sign(betas[0] * moment + (1 - betas[0]) * grad)
        param.data = param.data - lr * (update + weight_decay * param.data)
        moment.copy_(betas[1] * moment + (1 - betas[1]) * grad)


def test_lion_is_the_algorithm_of_the_paper():
    ours, theirs = make_model(), make_model()
    train(ours, Lion(ours.named_parameters(), lr=1e-2, betas=(0.8, 0.95), weight_decay=0.3))
    moments = [torch.zeros_like(p) for p in theirs.parameters()]

    class Reference:
        def zero_grad(self):
            theirs.zero_grad()

        def step(self):
            lion(theirs.parameters(), moments, 1e-2, (0.8, 0.95), 0.3)

    train(theirs, Reference())
    assert_close_models(ours, theirs)


def test_adam_adds_the_decay_to_the_gradient():
    ours, theirs = make_model(), make_model()
    rule = AdamWRule(decoupled=False)
    train(ours, NamedOptimizer(ours.named_parameters(), rule, lr=1e-2, weight_decay=0.3))
    train(theirs, torch.optim.Adam(theirs.parameters(), lr=1e-2, weight_decay=0.3))
    assert_close_models(ours, theirs)


TORCH = {
    "ASGD": {},
    "Adadelta": {"rho": 0.8},
    "Adafactor": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "Adamax": {},
    "NAdam": {"momentum_decay": 0.01},
    "RAdam": {"betas": (0.8, 0.9)},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
}


@pytest.mark.parametrize("name", TORCH)
def test_any_class_of_torch_runs_as_in_torch_and_resumes(name):
    ours, theirs = make_model(), make_model()
    config = OptimizerConfig(name=f"torch.optim.{name}", lr=1e-2, options=TORCH[name])
    optimizer = build_optimizer(ours, config, STATE)
    reference = getattr(torch.optim, name)(theirs.parameters(), lr=1e-2, **TORCH[name])
    if "weight_decay" in reference.defaults:
        for group in reference.param_groups:
            group["weight_decay"] = 0.0
    train(ours, optimizer, steps=5)
    train(theirs, reference)
    resumed = copy.deepcopy(ours)
    restored = build_optimizer(resumed, config, STATE)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(resumed, restored, first=5, steps=5)
    assert restored.step_count == STEPS
    assert_close_models(resumed, theirs)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion"])
def test_the_factory_makes_what_the_class_makes(name):
    ours, theirs = make_model(), make_model()
    betas = None if name == "sgd" else (0.8, 0.9)
    config = OptimizerConfig(name=name, lr=1e-2, weight_decay=0.2, betas=betas)
    train(ours, build_optimizer(ours, config, STATE))
    decay = [p for p in theirs.parameters() if p.ndim > 1]
    spared = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [
        {"params": decay, "weight_decay": 0.2},
        {"params": spared, "weight_decay": 0.0},
    ]
    betas = (0.8, 0.9)
    reference = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=1e-2, betas=betas),
        "adam": lambda: torch.optim.Adam(groups, lr=1e-2, betas=betas),
        "sgd": lambda: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
        "lion": lambda: Lion(groups, lr=1e-2, betas=betas),
    }
    train(theirs, reference[name]())
    assert_close_models(ours, theirs)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "torch.optim.RAdam"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(name, bad):
    model = make_model()
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=1e-2, max_norm=1.0), STATE)
    train(model, optimizer, steps=2)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model[0].weight.grad[0, 0] = bad
    result = optimizer.step()
    assert not result.stepped
    assert not math.isfinite(result.grad_norm)
    weights, state = before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    for number, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(v, state["state"][number][k]) for k, v in values.items())


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_a_step_above_the_threshold_is_skipped_by_every_optimizer(name):
    model = make_model()
    config = OptimizerConfig(name=name, lr=1e-2, max_norm=0.5, skip_above=2.0)
    optimizer = build_optimizer(model, config, STATE)
    before = [p.detach().clone() for p in model.parameters()]
    for param in model.parameters():
        param.grad = torch.full_like(param, 3.0)
    result = optimizer.step()
    count = sum(p.numel() for p in model.parameters())
    assert (result.stepped, result.grad_norm) == (False, pytest.approx(3 * math.sqrt(count)))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    assert optimizer.step_count == 0
    for param in model.parameters():
        param.grad = torch.full_like(param, 1 / math.sqrt(count))
    assert optimizer.step().stepped
    assert optimizer.step_count == 1


def test_gradients_are_clipped_by_norm_then_by_value():
    model, twin = make_model(), make_model()
    config = OptimizerConfig(name="sgd", lr=1.0, momentum=0.0, max_norm=0.5, max_value=0.1)
    (result,) = train(model, build_optimizer(model, config, STATE), steps=1)

    class Reference:
        def zero_grad(self):
            twin.zero_grad()

        def step(self):
            norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            torch.nn.utils.clip_grad_value_(twin.parameters(), 0.1)
            with torch.no_grad():
                for param in twin.parameters():
                    param -= param.grad
            return norm

    (norm,) = train(twin, Reference(), steps=1)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-12)
    assert_close_models(model, twin)
    assert any(p.grad.abs().max() == 0.1 for p in model.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "adamax"}, "name must be one of adamw, adam, sgd, lion.*torch.optim.RAdam"),
        ({"name": "torch.optim.Nadam"}, "torch.optim has no optimizer 'Nadam'"),
        ({"name": "torch.optim.LBFGS"}, "needs closures"),
        ({"name": "lion", "options": {"a": 1}}, "options .'a'. are for classes of torch"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"max_norm": 0.0}, "max_norm must be positive"),
        ({"max_value": -1.0}, "max_value must be positive"),
        ({"skip_above": math.nan}, "skip_above must be positive"),
        ({"name": "sgd", "momentum": 0.0, "nesterov": True}, "nesterov needs a momentum above 0"),
        ({"lr": -1.0}, "lr must be 0 or more"),
        ({"name": "torch.optim.Rprop", "weight_decay": 0.1}, "Rprop has no weight_decay; make"),
    ],
)
def test_a_configuration_that_can_not_work_says_why(fields, message):
    with pytest.raises(ValueError, match=message):
        build_optimizer(make_model(), OptimizerConfig(**{"lr": 1e-3, **fields}), STATE)


def test_a_momentum_that_was_left_out_can_not_come_later():
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="the optimizer was made without"):
        optimizer.step()


@pytest.mark.parametrize("make", [SGD, Lion, AdamW])
def test_bf16_parameters_have_masters_under_every_rule(make):
    ours, theirs = make_model(torch.bfloat16), make_model(torch.bfloat16).float()
    settings = {"momentum": 0.9} if make is SGD else {}
    optimizer = make(ours.named_parameters(), lr=1e-3, **settings)
    reference = make(theirs.named_parameters(), lr=1e-3, **settings)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            own.grad = torch.randn(own.shape, generator=generator).bfloat16()
            other.grad = own.grad.float()
        optimizer.step()
        reference.step()
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(optimizer.master(name), other)
        assert torch.equal(own, other.bfloat16())
