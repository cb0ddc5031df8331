"""Recorded and replayed routes, with and without recomputation."""

import pytest
import torch
from mt_moe import (
    MoELayer,
    MoEOptions,
    RouterOptions,
    RoutingError,
    recorded_routes,
    replayed_routes,
)
from mt_tensor_parallel import recompute
from plain import F64, drawn

HIDDEN, EXPERTS = 12, 6
checkpoint = torch.utils.checkpoint.checkpoint


class Model(torch.nn.Module):
    """Two layers, each recomputed in backward if requested."""

    def __init__(self, seed=0, again=None):
        super().__init__()
        torch.manual_seed(seed)
        options = MoEOptions(router=RouterOptions(dtype=F64))
        make = {"options": options, "dtype": F64}
        self.layers = torch.nn.ModuleList(MoELayer(HIDDEN, 8, EXPERTS, **make) for _ in range(2))
        self.again = again

    def forward(self, x):
        for layer in self.layers:

            def step(y, layer=layer):
                return y + layer(y).hidden

            match self.again:
                case None:
                    x = step(x)
                case "ours":
                    x = recompute(step, x)
                case _:
                    x = checkpoint(step, x, use_reentrant=self.again == "reentrant")
        return x


WAYS = [None, "ours", "torch", "reentrant"]
BATCHES = [drawn(2, 5, HIDDEN, seed=seed) for seed in range(3)]


def train(model):
    """Forwards of all batches, then backwards in their order; outputs and gradients."""
    outputs = [model(x.clone().requires_grad_()) for x in BATCHES]
    for y in outputs:
        y.square().sum().backward()
    return [*outputs, *(param.grad for param in model.parameters())]


@pytest.mark.parametrize("again", WAYS)
def test_a_record_has_each_forward_once_and_changes_nothing(again):
    expected, model = train(Model()), Model(again=again)
    with recorded_routes(model) as routes:
        found = train(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert {name: len(each) for name, each in routes.items()} == {
        "layers.0.router": 3,
        "layers.1.router": 3,
    }
    assert all(layer.router.record is None for layer in model.layers)


@pytest.mark.parametrize("again", WAYS)
def test_another_model_takes_recorded_choices_with_weights_of_its_own(again):
    first = Model(seed=5)
    with recorded_routes(first) as routes:
        train(first)
    plain, model = Model(), Model(again=again)
    with replayed_routes(plain, routes):
        expected = train(plain)
    with replayed_routes(model, routes), Taken(model) as taken:
        found = train(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[0], train(Model())[0])
    for name, each in taken.items():
        wanted = routes[name]
        assert all(torch.equal(a, b) for a, b in zip(each[:3], wanted, strict=True))
        assert len(each) == (3 if again is None else 6)  # again in recomputations
        if again is not None:
            assert all(torch.equal(a, b) for a, b in zip(each[3:], wanted, strict=True))


class Taken:
    """What each router returned, replayed or not."""

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        found, self.hooks = {}, []
        for name, layer in self.model.named_modules():
            if name.endswith("router"):
                own = found.setdefault(name, [])
                hook = layer.register_forward_hook(lambda m, i, out, own=own: own.append(out[1]))
                self.hooks.append(hook)
        return found

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()


def test_errors_name_what_does_not_fit():
    model = Model()
    with recorded_routes(model) as routes:
        model(BATCHES[0])
    few = pytest.raises(RoutingError, match="forward 2 has no recorded choice")
    with few, replayed_routes(model, routes):
        train(model)
    assert model.layers[0].router.record is None
    with pytest.raises(ValueError, match="other tokens"), replayed_routes(model, routes):
        model(BATCHES[0][:1])
    with pytest.raises(RoutingError, match="routers are"), replayed_routes(model, {}):
        pass
    with pytest.raises(TypeError, match="module"), recorded_routes([]):
        pass
