"""Layers in low precision against plain ones with the dequantised weight."""

from __future__ import annotations

import copy

import mt_fp8
import pytest
import torch
import torch.nn.functional as F
from mt_kernels import Selector
from mt_quant import (
    InputFormat,
    LinearShape,
    QuantizationConfig,
    QuantizationError,
    QuantizedLinear,
    Rule,
    quantize,
    quantize_weight,
)
from mt_quant.formats.weight import QuantizedMatrix
from mt_quant.layers.linear import tensors_of
from mt_quant.layers.matmul import MATMULS
from torch import nn


def _quantized(
    weight: str, *, input: str | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, dtype=dtype))
    return quantize(model, QuantizationConfig(rules=(Rule(weight=weight, input=input),)))


@pytest.mark.parametrize(
    "name", ["int8", "int8-tensor", "int8-asym", "int4-g32-asym", "fp8", "mxfp4", "nvfp4"]
)
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_by_the_dequantised_weight(
    name: str, rows: int, dtype: torch.dtype
) -> None:
    model = _quantized(name, dtype=dtype)
    x = torch.randn(rows, 64, dtype=dtype)
    weight = model[0].quantized_weight.dequantize(torch.float64)
    expected = F.linear(x.double(), weight, model[0].bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(model(x).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("weight", ["int8", "int8-tensor"])
@pytest.mark.parametrize("input", ["int8", "int8-tensor"])
def test_products_of_integers_are_exact(weight: str, input: str) -> None:
    layer = _quantized(weight, input=input)[0]
    x = torch.randn(5, 64)
    amax = x.abs().amax(-1, keepdim=True) if input == "int8" else x.abs().max()
    scale = amax / 127
    rounded = (x / scale).round().double() * scale.double()
    expected = rounded @ layer.quantized_weight.dequantize(torch.float64).T + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("input", ["fp8", "fp8-tensor", "mxfp8", "mxfp4", "nvfp4"])
def test_a_float_input_is_rounded_as_mt_fp8_does(input: str) -> None:
    layer = _quantized("fp8", input=input)[0]
    x = torch.randn(5, 64)
    rounded = mt_fp8.quantize(x, layer.input.scaling).dequantize()
    expected = F.linear(rounded, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "mxfp4", "nvfp4"])
def test_bytes_of_floats_survive_a_change_of_dtype(name: str) -> None:
    model = _quantized(name)
    before = model[0].weight
    assert torch.equal(model.bfloat16()[0].quantized_weight.dequantize(), before)


def test_every_kernel_that_serves_gives_the_same_product() -> None:
    for name, input in (
        ("int8", None),
        ("int4-g32", None),
        ("int4-g32-asym", None),
        ("int8", "int8"),
    ):
        layer = _quantized(name, input=input, dtype=torch.bfloat16)[0]
        x = torch.randn(2, 64, dtype=torch.bfloat16)
        layer.selector = Selector(MATMULS, "reference")
        expected, served = layer(x), 0
        for kernel in MATMULS.candidates:
            layer.selector = Selector(MATMULS, kernel.name)
            try:
                y = layer(x)
            except ValueError as error:
                assert "does not serve" in str(error)  # noqa: PT017 - not every kernel serves
                continue
            served += 1
            torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
        assert served >= 2, name


def test_gradients_reach_the_input_and_no_weight() -> None:
    model = _quantized("int4-g32", input="int8")
    x = torch.randn(3, 64, requires_grad=True)
    grad = torch.randn(3, 48)
    model(x).backward(grad)
    torch.testing.assert_close(x.grad, grad @ model[0].weight)
    assert not any(param.requires_grad for param in model.parameters())


def test_a_low_rank_part_and_a_scale_of_the_input_are_applied() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=False)
    matrix = QuantizedMatrix(
        weight=quantize_weight(linear.weight, "int8"),
        input_scale=torch.rand(64) + 0.5,
        low_rank=(torch.randn(3, 64), torch.randn(48, 3)),
    )
    shape = LinearShape.of(linear)
    tensors = tensors_of(matrix, shape, torch.float32)
    layer = QuantizedLinear.from_layer(linear, shape, tensors, format=matrix.weight.format)
    x = torch.randn(5, 64)
    torch.testing.assert_close(layer(x), x @ matrix.dequantize().T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.weight, matrix.dequantize())


def test_the_state_makes_the_same_layer_again() -> None:
    first, second = _quantized("int4-g32-asym"), _quantized("int4-g32-asym")
    with torch.no_grad():
        for param in second.parameters():
            param.zero_()
    second.load_state_dict(first.state_dict())
    x = torch.randn(3, 64)
    assert torch.equal(first(x), second(x))


@pytest.mark.parametrize("write", ["copy_", "parameter", "state"])
def test_weights_written_after_a_product_are_the_ones_that_multiply(write: str) -> None:
    first, second = _quantized("int4-g32", dtype=torch.bfloat16), _another()
    x = torch.randn(1, 64, dtype=torch.bfloat16)
    old = second(x)
    for name in ("weight_data", "weight_scale", "bias"):
        new = getattr(first[0], name)
        if write == "copy_":
            getattr(second[0], name).copy_(new)
        elif write == "parameter":
            setattr(second[0], name, nn.Parameter(new.clone(), requires_grad=False))
    if write == "state":
        second.load_state_dict(first.state_dict())
    assert not torch.equal(first(x), old)
    assert torch.equal(first(x), second(x))


def test_a_layer_made_in_inference_mode_notices_a_write_too() -> None:
    with torch.inference_mode():
        first, second = _quantized("int4-g32", dtype=torch.bfloat16), _another()
        x = torch.randn(1, 64, dtype=torch.bfloat16)
        old = second(x)
        for name in ("weight_data", "weight_scale", "bias"):
            getattr(second[0], name).copy_(getattr(first[0], name))
        assert not torch.equal(first(x), old)
        assert torch.equal(first(x), second(x))


def _another() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 48, dtype=torch.bfloat16))
    return quantize(model, QuantizationConfig(rules=(Rule(weight="int4-g32"),)))


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_without_its_scales_is_refused(strict: bool) -> None:
    model = _quantized("int8")
    state = model.state_dict()
    del state["0.weight_scale"]
    with pytest.raises(QuantizationError, match="no weight_scale"):
        model.load_state_dict(state, strict=strict)


def test_a_copy_shares_nothing_and_multiplies_the_same() -> None:
    model = _quantized("int4-g32", dtype=torch.bfloat16)
    x = torch.randn(1, 64, dtype=torch.bfloat16)
    y = model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), y)
    twin[0].weight_data.data.zero_()
    assert torch.equal(model(x), y)


def test_to_another_dtype_changes_the_bias_and_no_scale() -> None:
    model = _quantized("int8", input="int8")
    scale = model[0].weight_scale.clone()
    model.double()
    assert model[0].bias.dtype == torch.float64
    assert model[0].weight.dtype == torch.float64
    assert torch.equal(model[0].weight_scale, scale)
    assert model(torch.randn(2, 64, dtype=torch.float64)).dtype == torch.float64


def test_formats_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="one number"):
        InputFormat(type="int8", group="token", dynamic=False)
