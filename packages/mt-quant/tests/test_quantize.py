"""A whole model, layer by layer."""

from __future__ import annotations

import pytest
import torch
from mt_quant import (
    Progress,
    QuantizationConfig,
    QuantizationError,
    QuantizedLinear,
    Rule,
    quantize,
    quantize_weight,
)
from torch import nn


def test_layers_are_exchanged_in_place_and_progress_is_told() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 128))
    weights = [model[0].weight.clone(), model[2].weight.clone()]
    told: list[Progress] = []
    made = quantize(model, QuantizationConfig.named("int8"), progress=told.append)
    assert made is model
    assert [(p.name, p.done, p.total) for p in told] == [("0", 1, 2), ("2", 2, 2)]
    for layer, weight in zip((model[0], model[2]), weights, strict=True):
        assert torch.equal(layer.quantized_weight.data, quantize_weight(weight, "int8").data)


def test_a_model_that_is_one_layer_is_exchanged_itself() -> None:
    made = quantize(nn.Linear(8, 4), QuantizationConfig.named("int8"))
    assert isinstance(made, QuantizedLinear)


def test_a_shared_layer_stays_shared() -> None:
    layer = nn.Linear(8, 8)
    model = quantize(nn.Sequential(layer, nn.ReLU(), layer), QuantizationConfig.named("int8"))
    assert model[0] is model[2]
    assert isinstance(model[0], QuantizedLinear)


def test_nothing_is_changed_where_the_configuration_does_not_fit() -> None:
    model = nn.Sequential(nn.Linear(128, 8), nn.Linear(8, 8))
    with pytest.raises(QuantizationError):
        quantize(model, QuantizationConfig(rules=(Rule(weight="int4-g128"),)))
    assert all(type(layer) is nn.Linear for layer in model)


def test_a_layer_with_a_broken_weight_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight.data[0, 0] = float("nan")
    with pytest.raises(QuantizationError, match=r"^0: a weight .* not finite"):
        quantize(model, QuantizationConfig.named("int8"))


def test_what_uses_a_weight_in_its_own_way_is_left() -> None:
    attention = nn.MultiheadAttention(8, 2)  # multiplies by out_proj.weight itself
    with pytest.raises(QuantizationError, match="matches nothing"):
        quantize(attention, QuantizationConfig.named("int8"))
