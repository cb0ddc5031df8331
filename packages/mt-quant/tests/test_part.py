"""One rank's part of a weight has the codes that one rank gives to the whole weight."""

from __future__ import annotations

import pytest
import torch
from mt_parallel_state import ParallelLayout, ParallelState
from mt_quant import (
    LinearShape,
    QuantizationError,
    QuantizedWeight,
    WeightFormat,
    quantize_part,
    quantize_weight,
)

FORMATS = ("int8", "int8-tensor", "int8-asym", "int4-g16", "int4-g32-asym", "fp8", "fp8-tensor")
FORMATS += ("mxfp8", "mxfp4", "nvfp4")
TENSORS = ("data", "scale", "zero", "level")


def weight() -> torch.Tensor:
    return torch.randn(12, 2, 64, generator=torch.Generator().manual_seed(0))


def same(found: QuantizedWeight, expected: QuantizedWeight) -> None:
    assert found.columns == expected.columns
    for name in TENSORS:
        own, other = getattr(found, name), getattr(expected, name)
        assert (own is None) == (other is None), name
        assert own is None or (own.dtype == other.dtype and torch.equal(own, other)), name


def part(name: str, split: str) -> QuantizedWeight:
    state = ParallelState(ParallelLayout(tp=2))
    dim, rank = 0 if split == "outputs" else 1, state.rank
    shape = {"outputs": (12,), "inputs": (2, 64)}
    shape[split] = (shape[split][0] // 2, *shape[split][1:])
    own = weight().chunk(2, dim)[rank]
    place = LinearShape(**shape, split=split, group=state.group("tp"))
    return quantize_part(own, WeightFormat.named(name), place)


@pytest.mark.parametrize("split", ["outputs", "inputs"])
def test_parts_have_the_codes_of_the_whole_weight(ranks, split) -> None:
    def body() -> list[QuantizedWeight]:
        return [part(name, split) for name in FORMATS]

    for rank, found in enumerate(ranks(2, body)):
        for name, own in zip(FORMATS, found, strict=True):
            whole = quantize_weight(weight().flatten(1), name)
            size = 6 if split == "outputs" else 64
            index = torch.arange(rank * size, (rank + 1) * size)
            same(own, whole.take(*((index, None) if split == "outputs" else (None, index))))


@pytest.mark.parametrize("name", FORMATS)
def test_codes_without_values_have_the_shapes_and_dtypes_of_others(name) -> None:
    wanted = quantize_weight(weight().flatten(1), name)
    found = QuantizedWeight.empty(12, 128, WeightFormat.named(name))
    assert found.nbytes == wanted.nbytes
    for tensor in TENSORS:
        own, other = getattr(found, tensor), getattr(wanted, tensor)
        assert (own is None) == (other is None)
        assert own is None or (own.shape, own.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize(("name", "inputs"), [("int4-g32", (3, 16)), ("int4-g3", (3,))])
def test_inputs_that_cut_a_group_or_a_byte_are_refused(name, inputs) -> None:
    shape = LinearShape(outputs=(2,), inputs=inputs)
    with pytest.raises(QuantizationError, match=r"groups of 32|two to a byte"):
        quantize_part(torch.ones(2, *inputs), WeightFormat.named(name), shape)
