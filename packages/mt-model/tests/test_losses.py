"""Losses of layers: declarations, returned values, and their way to the trainer."""

from dataclasses import dataclass, replace

import pytest
import torch
from mt_model import GPT, FeedForwardConfig, ModelConfig, MTPConfig, gpt
from routed import RoutedConfig
from torch import nn

TINY = gpt(vocab_size=32, hidden_size=8, num_layers=3, num_heads=2, max_sequence_length=8)
BATCH = {"tokens": torch.arange(16).view(2, 8), "labels": torch.arange(16).view(2, 8)}


def with_feed_forward(*entries):
    layers = zip(TINY.layers, entries, strict=True)
    return replace(TINY, layers=tuple(replace(layer, feed_forward=ff) for layer, ff in layers))


def test_a_models_weights_are_those_of_its_entries():
    plain, routed = TINY.layers[0].feed_forward, RoutedConfig(width=4)
    config = with_feed_forward(plain, routed, routed)
    assert TINY.loss_weights == {"lm": 1.0}
    assert config.loss_weights == {"lm": 1.0, "aux": 0.3, "z": 0.01}
    assert ModelConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match=r"the loss 'aux' has the weights 0\.3 and 0\.4; use one"):
        with_feed_forward(plain, routed, RoutedConfig(width=4, weight=0.4))
    with pytest.raises(ValueError, match="'aux' has the weights inf and inf; use one finite"):
        with_feed_forward(plain, plain, RoutedConfig(width=4, weight=float("inf")))
    with pytest.raises(ValueError, match="'aux' has the weights nan and nan; use one finite"):
        with_feed_forward(plain, plain, RoutedConfig(width=4, weight=float("nan")))


def test_equal_names_of_layers_are_added_and_generation_leaves_losses_out():
    plain, routed = TINY.layers[0].feed_forward, RoutedConfig(width=4)
    whole = GPT(with_feed_forward(plain, routed, routed), seed=1)
    losses = whole(None, BATCH)
    assert list(losses) == ["lm", "tokens", "aux", "z"]
    x, shared = whole.begin(None, BATCH)
    by_layer = []
    for layer in whole.stage_layers():
        x, named = layer(x, shared)
        by_layer.append(named)
    assert by_layer[0] == {}
    assert torch.equal(by_layer[1]["aux"] + by_layer[2]["aux"], losses["aux"])
    assert whole(BATCH["tokens"]).shape == (2, 8, 32)
    cache = whole.new_cache(batch_size=2, max_length=8)
    assert whole.logits(BATCH["tokens"], cache=cache).shape == (2, 8, 32)
    stage = GPT(whole.config, layers=range(2), seed=1)
    assert list(stage(None, BATCH)[1]) == ["aux", "z"]
    cache = stage.new_cache(batch_size=2, max_length=8)
    assert stage(None, {"tokens": BATCH["tokens"], "cache": cache}).shape == (2, 8, 8)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_pass_in_parts_is_the_pass(recompute):
    plain, routed = TINY.layers[0].feed_forward, RoutedConfig(width=4)
    model = GPT(with_feed_forward(routed, None, plain), recompute=recompute, seed=1)
    expected, state = model(None, BATCH), None
    parts = model.parts(BATCH)
    assert len(parts) == 2 + (3 if recompute == "full" else 5)
    for part in parts:
        state = part(state)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value)


@dataclass(frozen=True, kw_only=True)
class FixedConfig(FeedForwardConfig):
    """Returns what it is told."""

    returns: object
    names: tuple[str, ...] = ("aux",)

    @property
    def loss_weights(self):
        return dict.fromkeys(self.names, 1.0)

    def build(self, model, *, layer, shard):
        return Fixed(self.returns)

    def num_parameters(self, hidden_size):
        return 0

    def flops_per_token(self, hidden_size, sequence_length):
        return 0


class Fixed(nn.Module):
    def __init__(self, losses):
        super().__init__()
        self.losses = losses

    def forward(self, x):
        return x if self.losses is None else (x, self.losses)


@pytest.mark.parametrize(
    ("returns", "names", "error", "text"),
    [
        (
            None,
            ("aux",),
            ValueError,
            r"the FixedConfig of layer 1 returned the losses \[\], but its "
            r"loss_weights has \['aux'\]: name there each",
        ),
        ({"aux": torch.ones(())}, (), ValueError, r"returned the losses \['aux'\], but its loss_w"),
        (
            {"aux": 1.0},
            ("aux",),
            TypeError,
            "loss 'aux' of the FixedConfig of layer 1 must be a sc",
        ),
        ({"aux": torch.ones(2)}, ("aux",), TypeError, r"got a \(2,\) tensor of torch.float32"),
        ({"aux": torch.ones((), dtype=torch.bfloat16)}, ("aux",), TypeError, "tensor of torch.bfl"),
    ],
)
def test_wrong_losses_of_an_entry_are_named(returns, names, error, text):
    plain = TINY.layers[0].feed_forward
    config = with_feed_forward(plain, FixedConfig(returns=returns, names=names), plain)
    with pytest.raises(error, match=text):
        GPT(config, seed=1)(None, BATCH)


@pytest.mark.parametrize("name", ["lm", "tokens", "total", "val", "a b"])
def test_names_with_another_meaning_are_refused(name):
    plain = TINY.layers[0].feed_forward
    with pytest.raises(ValueError, match=f"a loss is called '{name}'; use a word other than"):
        with_feed_forward(plain, FixedConfig(returns=None, names=(name,)), plain)


def test_the_loss_of_each_label_has_its_weight():
    config = replace(TINY, z_loss=0.1, mtp=MTPConfig())
    model = GPT(config, seed=1, dtype=torch.float64)
    weight = next(model.parameters())
    weights = torch.rand(2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = BATCH["labels"].clone()
    labels[0, 2:5] = -100

    def losses(**more):
        found = model(None, {**BATCH, "labels": labels, **more})
        found["lm"].backward()
        grad, weight.grad = weight.grad, None
        return found, grad

    whole, grad = losses(label_weights=weights)
    sums = dict.fromkeys(("lm", "z", "mtp_1"), 0.0)
    expected = torch.zeros_like(grad)
    for row, place in (labels != -100).nonzero().tolist():
        one = torch.zeros_like(weights)
        one[row, place] = 1
        found, own = losses(label_weights=one)
        expected += weights[row, place] * own
        for name in sums:
            sums[name] += float(weights[row, place] * found[name].detach())
    for name, value in sums.items():
        assert float(whole[name].detach()) == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=0)
    plain, grad = losses()
    ones, same = losses(label_weights=torch.ones_like(weights))
    torch.testing.assert_close(ones["lm"], plain["lm"], rtol=1e-12, atol=0)
    torch.testing.assert_close(same, grad, rtol=1e-10, atol=1e-14)
    assert ones["tokens"] == plain["tokens"] == 13
