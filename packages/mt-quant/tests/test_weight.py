"""Weights in low precision: bounds of their error, their bytes, and their parts."""

from __future__ import annotations

import mt_fp8
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_quant import (
    QuantizationError,
    WeightFormat,
    quantize_weight,
)
from mt_quant.formats.grid import find_grid, round_to_grid
from mt_quant.formats.weight import encode

FLOATS = ("fp8", "fp8-tensor", "fp8-g32", "mxfp8", "mxfp4", "nvfp4")
NAMES = (
    "int8",
    "int8-tensor",
    "int8-asym",
    "int8-g32",
    "int4-g16",
    "int4-g32-asym",
    "int4-channel",
)


def _weight(seed: int = 0, rows: int = 24, columns: int = 96) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(rows, 1, generator=generator) * 10
    return torch.randn(rows, columns, generator=generator) * scale


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_an_element_moves_by_at_most_half_a_step(name: str, seed: int) -> None:
    weight = _weight(seed)
    quantized = quantize_weight(weight, name)
    scale, _ = quantized.grid.of_columns(0, weight.shape[1])
    error = (quantized.dequantize() - weight).abs() / scale
    # a whole zero point cuts an end of the range by up to a half
    assert error.max() <= (1.0 if name.endswith("asym") else 0.5) + 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_dequantized_values_are_quantized_without_loss(name: str) -> None:
    once = quantize_weight(_weight(), name)
    values = once.dequantize()
    again = encode(values, once.grid)
    assert torch.equal(again.data, once.data)
    assert torch.equal(round_to_grid(values, once.grid), values)


@pytest.mark.parametrize(
    ("name", "data", "scales"), [("int8", 24 * 96, 24), ("int4-g32", 12 * 96, 24 * 3)]
)
def test_bytes_are_those_of_codes_and_bf16_scales(name: str, data: int, scales: int) -> None:
    assert quantize_weight(_weight(), name).nbytes == data + 2 * scales


@pytest.mark.parametrize("name", FLOATS)
def test_floats_have_the_bits_of_mt_fp8(name: str) -> None:
    weight = _weight()
    quantized = quantize_weight(weight, name)
    expected = mt_fp8.quantize(weight, quantized.format.scaling)
    assert torch.equal(quantized.dequantize(), expected.dequantize(torch.float32))
    assert quantized.nbytes == expected.nbytes


@pytest.mark.parametrize("name", FLOATS)
def test_float_values_are_quantized_without_loss(name: str) -> None:
    once = quantize_weight(_weight(), name)
    again = encode(once.dequantize(), once.grid)
    assert torch.equal(again.dequantize(), once.dequantize())
    assert torch.equal(again.scale, once.scale)
    columns = [round_to_grid(_weight()[:, j : j + 1], once.grid, start=j) for j in range(96)]
    assert torch.equal(torch.cat(columns, dim=1), round_to_grid(_weight(), once.grid))


def test_int4_codes_are_two_to_a_byte_the_even_column_low() -> None:
    weight = torch.tensor([[7.0, -7.0, 0.0, 3.0]])
    quantized = quantize_weight(weight, "int4-channel")
    assert quantized.data.tolist() == [[15 | 1 << 4, 8 | 11 << 4]]
    assert quantized.codes().tolist() == [[7, -7, 0, 3]]


def test_zero_is_a_value_of_every_grid() -> None:
    weight = torch.tensor([[3.0, 0.0, 5.0, 4.0]])
    for name in ("int8-asym", "int4-g4-asym", "int4-g4", "int8"):
        assert quantize_weight(weight, name).dequantize()[0, 1] == 0


def test_zeros_stay_zeros() -> None:
    for name in NAMES:
        assert not quantize_weight(torch.zeros(4, 96), name).dequantize().any()


def test_columns_rounded_one_at_a_time_are_those_rounded_at_once() -> None:
    weight, format = _weight(), WeightFormat.named("int4-g16-asym")
    grid = find_grid(weight, format)
    columns = [round_to_grid(weight[:, j : j + 1], grid, start=j) for j in range(96)]
    assert torch.equal(torch.cat(columns, dim=1), round_to_grid(weight, grid))


def test_a_grid_put_together_of_parts_is_that_of_the_whole() -> None:
    weight, format = _weight(), WeightFormat.named("int4-g16-asym")
    whole = find_grid(weight, format)
    grid = find_grid(torch.zeros_like(weight), format)
    for start in range(0, 96, 32):
        grid = grid.with_columns(start, find_grid(weight[:, start : start + 32], format))
    assert torch.equal(grid.scale, whole.scale)
    with pytest.raises(ValueError, match="can't replace groups of 16"):
        grid.with_columns(8, whole)


@pytest.mark.parametrize(
    "name", ["int8", "int8-tensor", "int4-g16", "int4-g16-asym", "fp8", "fp8-tensor", "nvfp4"]
)
def test_a_part_of_the_codes_is_the_part_of_the_values(name: str) -> None:
    quantized = quantize_weight(_weight(), name)
    rows, columns = (
        torch.tensor([3, 4, 5, 9]),
        torch.cat((torch.arange(16, 48), torch.arange(64, 80))),
    )
    part = quantized.take(rows, columns)
    assert part.shape == (4, 48)
    assert torch.equal(part.dequantize(), quantized.dequantize()[rows][:, columns])


def test_a_part_that_cuts_groups_is_refused() -> None:
    quantized = quantize_weight(_weight(), "int4-g16")
    with pytest.raises(QuantizationError, match="cut groups of 16"):
        quantized.take(columns=torch.arange(8, 24))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    weight = _weight()
    weight[3, 5] = value
    with pytest.raises(QuantizationError, match="not finite"):
        quantize_weight(weight, "int8")


def test_groups_that_do_not_divide_and_odd_inputs_are_refused() -> None:
    with pytest.raises(QuantizationError, match=r"groups of 64 inputs .* do not divide 96"):
        quantize_weight(_weight(), "int4-g64")
    with pytest.raises(QuantizationError, match="two to a byte"):
        quantize_weight(_weight()[:, :5], "int4-channel")


@pytest.mark.parametrize("name", ["int5", "int8-g", "int4-big", "int8-g1", "fp8-asym", "nvfp4-g32"])
def test_an_unknown_format_is_refused_by_name(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"unknown weight format|is none of|2 or more|no zero points|blocks of 16"
    ):
        quantize_weight(_weight(), name)


@pytest.mark.parametrize("name", NAMES + FLOATS)
def test_a_format_is_what_its_text_names(name: str) -> None:
    format = WeightFormat.named(name)
    assert WeightFormat.named(str(format)) == format
