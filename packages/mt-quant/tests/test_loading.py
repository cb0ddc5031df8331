"""States of quantised models, given to models in full precision."""

from __future__ import annotations

import pytest
import torch
from mt_quant import QuantizationConfig, QuantizationError, Rule, load_quantized, quantize
from torch import Tensor, nn

RULES = {
    "int4": Rule(weight="int4-g32-asym"),
    "static": Rule(weight="nvfp4", input="fp8-static"),
    "svdquant": Rule(weight="int4-g32", method="svdquant", options={"rank": 4}),
    "smoothquant": Rule(weight="int8", input="int8", method="smoothquant"),
}


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    shared = nn.Linear(64, 64)
    return nn.Sequential(shared, nn.LayerNorm(64), shared, nn.Linear(64, 32, bias=False))


def _made(rule: str) -> tuple[QuantizationConfig, nn.Module]:
    config = QuantizationConfig(rules=(RULES[rule],))
    return config, quantize(_model(), config, [torch.randn(8, 64)])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_state_makes_the_same_model_of_another_one(rule: str, device: str) -> None:
    config, expected = _made(rule)
    with torch.device(device):
        model = _model(seed=1)
    loaded = load_quantized(model, config, expected.state_dict())
    assert loaded[0] is loaded[2]
    x = torch.randn(4, 64)
    assert torch.equal(loaded(x), expected(x))


def _without(name: str):
    return lambda state: {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without("0.weight_scale"), "^0: .* missing: weight_scale"),
        (_without("3.weight_data"), "^3: .* missing: weight_data"),
        (_without("3.input_step"), "^3: .* missing: input_step"),
        (_without("1.weight"), r"lacks 1 tensors \(1.weight\)"),
        (lambda state: state | {"extra": torch.ones(1)}, r"has 1 more \(extra\)"),
        (lambda state: state | {"3.weight_data": torch.ones(3)}, "^3: expected 2 dims"),
        (lambda state: state | {"3.weight_scale": torch.ones(3, 1)}, "^3: weight_scale of nvfp4"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(spoil, message: str) -> None:
    config, made = _made("static")
    model = _model()
    state: dict[str, Tensor] = spoil(made.state_dict())
    with pytest.raises(QuantizationError, match=message):
        load_quantized(model, config, state)
    assert type(model[0]) is nn.Linear
