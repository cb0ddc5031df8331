"""Training with rounded operands: their values, and gradients that pass the rounding."""

from __future__ import annotations

import pytest
import torch
from mt_quant import (
    Decision,
    FakeQuantizer,
    LinearShape,
    QuantizationError,
    Rule,
    quantize_weight,
    training_obstacle,
)
from mt_quant.formats.activation import round_activation
from torch import nn


def test_products_are_those_of_rounded_operands_and_gradients_pass_the_rounding() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 16)
    decision = Rule(weight="int4-g16", input="int8").decision(0)
    quantizer = FakeQuantizer(LinearShape.of(layer), decision)
    x = torch.randn(3, 32, requires_grad=True)
    y = quantizer.linear(x, layer.weight, layer.bias)
    weight = quantize_weight(layer.weight, "int4-g16").dequantize()
    rounded = round_activation(x, decision.input)
    torch.testing.assert_close(y, rounded @ weight.T + layer.bias)
    grad = torch.randn_like(y)
    y.backward(grad)
    torch.testing.assert_close(x.grad, grad @ weight)
    torch.testing.assert_close(layer.weight.grad, grad.T @ rounded)


def test_a_kept_weight_is_rounded_again_when_it_is_forgotten() -> None:
    layer = nn.Linear(8, 4)
    decision = Rule(weight="int8").decision(0)
    quantizer = FakeQuantizer(LinearShape.of(layer), decision, keeps_weight=True)
    first = quantizer.round_weight(layer.weight)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert quantizer.round_weight(layer.weight) is first
    quantizer.forget_weight()
    assert not torch.equal(quantizer.round_weight(layer.weight), first)


def test_a_decision_without_a_weight_is_refused() -> None:
    with pytest.raises(QuantizationError, match="no format"):
        FakeQuantizer(LinearShape.of(nn.Linear(8, 4)), Decision())


@pytest.mark.parametrize(
    ("rule", "word"),
    [
        (Rule(weight="int8", input="fp8"), None),
        (Rule(weight="int8", method="gptq"), "gptq"),
        (Rule(weight="int8", input="int8-static"), "token"),
    ],
)
def test_training_says_what_it_can_not_round(rule: Rule, word: str | None) -> None:
    said = training_obstacle(rule.decision(0))
    assert said is None if word is None else word in said
