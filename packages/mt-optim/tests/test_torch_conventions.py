"""AdamW where torch.optim.AdamW is expected: arguments, groups, schedulers, state dicts."""

import copy

import pytest
import torch
from mt_data_parallel import GradBuffer
from mt_optim import SGD, AdamW, Muon, Orthogonalization, default_decay_filter
from torch import nn

SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}


def make_model(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def groups_of(model):
    """Two groups that differ in rate, decay and betas."""
    first, last = list(model[0].parameters()), list(model[2:].parameters())
    return [
        {"params": first, "lr": 3e-3, "weight_decay": 0.0},
        {"params": last, "betas": (0.7, 0.95)},
    ]


def train(model, optimizer, *, first=0, steps=6, scheduler=None):
    """Steps with seeded data, so that two models that are equal see equal gradients."""
    for step in range(first, first + steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x.to(model[0].weight.dtype)).square().sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_equal_models(ours, theirs):
    for (name, own), (_, other) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert torch.equal(own, other), name


@pytest.mark.parametrize(
    "params_of",
    [
        lambda model: model.parameters(),
        lambda model: model.named_parameters(),
        groups_of,
        lambda model: [
            {"params": model[0].named_parameters("first")},
            {"params": model[2:].named_parameters("last")},
        ],
    ],
    ids=["parameters", "named", "groups", "named groups"],
)
@pytest.mark.parametrize("settings", [{}, SETTINGS], ids=["defaults", "settings"])
def test_every_way_to_give_parameters_equals_torch_bit_for_bit(params_of, settings):
    ours, theirs = make_model(), make_model()
    train(ours, AdamW(params_of(ours), **settings))
    train(theirs, torch.optim.AdamW(params_of(theirs), fused=True, **settings))
    assert_equal_models(ours, theirs)
    assert not torch.equal(ours[0].weight, make_model()[0].weight)


def test_a_single_linear_layer_is_trained():
    model = nn.Linear(4, 2)  # its weight is one pair of rows: not to be taken for a named pair
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert all(not torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.7),
            ],
            milestones=[3],
        ),
    ],
    ids=["lambda", "cosine", "one-cycle", "sequential"],
)
def test_torch_schedulers_drive_it_as_they_drive_torch(scheduler):
    ours, theirs = make_model(), make_model()
    optimizer = AdamW(groups_of(ours), **SETTINGS)
    reference = torch.optim.AdamW(groups_of(theirs), fused=True, **SETTINGS)
    train(ours, optimizer, scheduler=scheduler(optimizer))
    train(theirs, reference, scheduler=scheduler(reference))
    assert_equal_models(ours, theirs)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == [group["lr"] for group in reference.param_groups]
    assert rates != [3e-3, 1e-2]


def test_a_one_cycle_schedule_drives_muon_with_its_momentum():
    model = nn.Linear(6, 5, bias=False)
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = Muon(
        ours.named_parameters(), orthogonalization=Orthogonalization(scale="shape_scaling")
    )
    reference = torch.optim.Muon(theirs.parameters(), nesterov=True)
    one_cycle = torch.optim.lr_scheduler.OneCycleLR
    for each, stepper in ((ours, optimizer), (theirs, reference)):
        scheduler = one_cycle(stepper, max_lr=0.1, total_steps=6)
        for step in range(5):
            each(torch.full((2, 6), 1.0 + step)).square().sum().backward()
            stepper.step()
            stepper.zero_grad()
            scheduler.step()
    assert torch.equal(ours.weight, theirs.weight)
    both = Muon(make_model().named_parameters())  # with AdamW for biases, whose betas stay
    scheduler = one_cycle(both, max_lr=0.1, total_steps=6)
    momenta = []
    for _ in range(5):
        momenta.append(both.param_groups[0]["momentum"])
        both.step()
        scheduler.step()
    assert momenta[0] == 0.95 > min(momenta)
    assert both.param_groups[-1]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_with_nesterov_leaves_gradients_as_they_are(weight_decay):
    model = make_model()
    settings = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": weight_decay}
    optimizer = SGD(model.named_parameters(), **settings)
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
        before = [param.grad.clone() for param in model.parameters()]
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_state_dict_round_trip_continues_bit_equal(dtype, tmp_path):
    straight = make_model(dtype)
    optimizer = AdamW(groups_of(straight), **SETTINGS)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    train(straight, optimizer, steps=3, scheduler=scheduler)
    saved = {"model": straight.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**saved, "scheduler": scheduler.state_dict()}, tmp_path / "state")

    resumed = make_model(dtype, seed=1)
    restored = AdamW(groups_of(resumed), lr=0.5)
    again = torch.optim.lr_scheduler.StepLR(restored, 2, 0.5)
    loaded = torch.load(tmp_path / "state", weights_only=True)
    restored.load_state_dict(loaded["optimizer"])
    again.load_state_dict(loaded["scheduler"])
    resumed.load_state_dict(loaded["model"])
    assert restored.step_count == 3
    train(straight, optimizer, first=3, steps=3, scheduler=scheduler)
    train(resumed, restored, first=3, steps=3, scheduler=again)
    assert_equal_models(resumed, straight)
    for own, other in zip(restored.names, optimizer.names, strict=True):
        assert torch.equal(restored.moment(own, "exp_avg"), optimizer.moment(other, "exp_avg"))
        assert torch.equal(
            restored.moment(own, "exp_avg_sq"), optimizer.moment(other, "exp_avg_sq")
        )
        assert torch.equal(restored.master(own), optimizer.master(other))


def test_the_state_of_torch_adamw_is_taken_over():
    theirs = make_model()
    reference = torch.optim.AdamW(groups_of(theirs), fused=True, **SETTINGS)
    train(theirs, reference, steps=3)
    ours = copy.deepcopy(theirs)
    optimizer = AdamW(groups_of(ours))
    optimizer.load_state_dict(reference.state_dict())
    train(theirs, reference, first=3)
    train(ours, optimizer, first=3)
    assert_equal_models(ours, theirs)


def test_a_deep_copy_goes_on_alone():
    ours = make_model()
    optimizer = AdamW(ours.named_parameters(), decay_filter=default_decay_filter)
    train(ours, optimizer, steps=2)
    twin, copied = copy.deepcopy((ours, optimizer))
    train(ours, optimizer, first=2)
    assert copied.step_count == 2
    train(twin, copied, first=2)
    assert_equal_models(ours, twin)
    assert copied.names == optimizer.names


def test_a_filter_makes_groups_that_can_be_seen():
    model = make_model()
    optimizer = AdamW(model.named_parameters(), weight_decay=0.1, decay_filter=default_decay_filter)
    seen = {tuple(g["param_names"]): g["weight_decay"] for g in optimizer.param_groups}
    spared = ("0.bias", "2.weight", "2.bias", "3.bias")
    assert seen == {("0.weight", "3.weight"): 0.1, spared: 0.0}


def test_a_group_added_later_is_trained_from_then_on():
    ours, theirs = make_model(), make_model()
    optimizers = [
        AdamW(ours[0].parameters(), **SETTINGS),
        torch.optim.AdamW(theirs[0].parameters(), fused=True, **SETTINGS),
    ]
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        for layer in model[2:]:
            layer.requires_grad_(False)
        train(model, optimizer, steps=2)
        for layer in model[2:]:
            layer.requires_grad_(True)
        optimizer.add_param_group({"params": model[2:].parameters(), "lr": 0.5})
        train(model, optimizer, first=2)
    assert_equal_models(ours, theirs)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_forgets_gradients_wherever_they_are(set_to_none):
    model = make_model(torch.bfloat16)
    optimizer = AdamW(model.parameters())
    with GradBuffer(model.named_parameters(), group=None) as buffer:
        buffer.start(1)
        model(torch.ones(2, 5).bfloat16()).sum().backward()
        buffer.finish()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert not any(param.main_grad.any() for param in model.parameters())
    model(torch.ones(2, 5).bfloat16()).sum().backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    grads = [param.grad for param in model.parameters()]
    assert all(grad is None if set_to_none else not grad.any() for grad in grads)


def test_a_closure_is_called_with_gradients_and_its_loss_returned():
    model, twin = make_model(), make_model()
    x = torch.ones(2, 5)
    optimizer, reference = AdamW(model.parameters()), AdamW(twin.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure).loss
    expected = twin(x).square().sum()
    expected.backward()
    reference.step()
    assert torch.equal(loss, expected)
    assert_equal_models(model, twin)


WEIGHT = nn.Parameter(torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (WEIGHT, TypeError, r"params is a tensor of shape \(2, 2\); pass module.parameters"),
        (nn.Sequential(nn.Linear(1, 1)), TypeError, "got the module Sequential; pass its param"),
        ({"w": WEIGHT}, TypeError, "params is {'w'"),
        (None, TypeError, "params is None"),
        (3, TypeError, r"params is 3 \(int\)"),
        ("weights", TypeError, "params is 'weights'"),
        ([], ValueError, "there is no parameter to train"),
        ([nn.Parameter(torch.zeros(2), requires_grad=False)], ValueError, "no parameter to train"),
        ([WEIGHT, 1.0], TypeError, "expected a parameter, got 1.0"),
        ([WEIGHT, ("w", WEIGHT)], TypeError, "with names for all or for none"),
        ([("w", WEIGHT, 1)], TypeError, "expected a pair of name and parameter"),
        ([WEIGHT * 2], ValueError, "'0' is the result of an operation"),
        ([WEIGHT, WEIGHT], ValueError, r"'1' is listed twice \(first as '0'\)"),
        ([{"params": {WEIGHT}}], TypeError, "pass a list, which has an order"),
        ([{"lr": 1.0}], ValueError, "a group needs 'params'"),
        ([{"params": [WEIGHT], "weight_deacy": 0}], ValueError, "Did you mean 'weight_decay'"),
        ([{"params": [WEIGHT], "amsgrad": True}], ValueError, "a group has no key 'amsgrad'"),
        ([{"params": [WEIGHT], "lr": -1.0}], ValueError, "lr must be 0 or more and finite"),
        ([{"params": [WEIGHT]}, WEIGHT], TypeError, "expected a group as the ones before it"),
        (
            [{"params": [WEIGHT]}, {"params": nn.Linear(2, 2).named_parameters()}],
            ValueError,
            "some groups have parameters with names and some without",
        ),
    ],
)
def test_what_would_train_nothing_is_refused(params, error, message):
    with pytest.raises(error, match=message):
        AdamW(params, lr=1e-3)


def test_a_rate_in_the_place_of_a_closure_is_refused():
    with pytest.raises(TypeError, match=r"for a learning rate write lr=0.1"):
        AdamW([WEIGHT]).step(0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["param_groups"].pop(), "has 1 groups and this optimizer 2"),
        (lambda s: s["param_groups"][0]["params"].pop(), "group 0 of the state has 1 parameters"),
        (lambda s: s["state"].pop(0), "state of parameter '0.weight' has no step"),
        (lambda s: s["state"][1].pop("exp_avg"), "state of parameter '0.bias' has no exp_avg"),
        (
            lambda s: s["state"][0].update(exp_avg=torch.zeros(3)),
            r"exp_avg of parameter '0.weight' has shape \(3,\)",
        ),
        (lambda s: s["param_groups"][1].update(amsgrad=True), "amsgrad=True"),
        (lambda s: s["param_groups"][1].update(lr=float("nan")), "lr must be 0 or more"),
        (
            lambda s: s["param_groups"][0]["param_names"].reverse(),
            "'0.bias' where this optimizer has '0.weight'",
        ),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, message):
    model = make_model()
    optimizer = AdamW([{"params": model[i].named_parameters(str(i))} for i in (0, 3)])
    train(model, optimizer, steps=2)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, steps=1)
    before = copy.deepcopy(optimizer.state_dict())
    change(state)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, values in before["state"].items():
        assert all(torch.equal(after["state"][number][key], v) for key, v in values.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_named(dtype):
    model = make_model(dtype)
    optimizer = AdamW(model.named_parameters(), lr=1e-3)
    train(model, optimizer, steps=1)
    assert optimizer.non_finite() == []
    train(model, optimizer, first=1, steps=1)
    optimizer.moment("3.bias", "exp_avg")[1] = float("nan")
    optimizer.master("0.weight")[0, 0] = -float("inf")
    assert optimizer.non_finite() == ["0.weight", "3.bias"]


def test_a_rate_that_overflows_the_weights_is_noticed():
    model = make_model()
    optimizer = AdamW(model.named_parameters(), lr=3e38, weight_decay=1.0)
    train(model, optimizer, steps=1)
    optimizer.step()
    assert "0.weight" in optimizer.non_finite()
