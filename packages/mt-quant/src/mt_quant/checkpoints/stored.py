"""Quantised linear layers as checkpoints of other software store them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mt_quant.error import QuantizationError
from mt_quant.formats.format import InputFormat, WeightFormat
from mt_quant.formats.weight import QuantizedWeight


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredLinear:
    """A quantised linear layer of a checkpoint.

    Attributes:
        weight: The quantised weight.
        input: Format to round the input to; None leaves it.
        step: Static scale of the input, for an `input` that is not dynamic.
        order: Index in the layer of each column of `weight`, for layouts that sort columns by
            group; None for the layer's own order.
        input_scale: Factors of the input's features, applied before the product; None for none.

    Shape:
        step: fp32 [1, 1]. order, input_scale: [in].
    """

    weight: QuantizedWeight
    input: InputFormat | None = None
    step: Tensor | None = None
    order: Tensor | None = None
    input_scale: Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values of the weight.

        Shape:
            Returns [out, in].
        """
        values = self.weight.dequantize(dtype)
        if self.input_scale is not None:
            values = (values.float() * self.input_scale).to(dtype)
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order, values)

    def take(self, rows: Tensor | None = None, columns: Tensor | None = None) -> StoredLinear:
        """Return selected outputs and inputs, by index.

        Raises:
            QuantizationError: The columns cut a group, or are sorted by group.
        """
        if self.order is not None:
            raise QuantizationError(
                "its inputs are sorted by group (g_idx), which no layer here computes with; "
                "read it dequantised"
            )
        scale = self.input_scale
        scale = scale if scale is None or columns is None else scale[columns]
        return replace(self, weight=self.weight.take(rows, columns), input_scale=scale)


def join_rows(parts: Sequence[StoredLinear], rows: Tensor) -> StoredLinear:
    """Concatenate the outputs of several layers with the same input.

    Different scales of whole tensors become scales of channels. The largest static input scale
    serves all parts.

    Args:
        parts: Layers with equal formats.
        rows: Index in the result of each output, over all parts in order.

    Raises:
        QuantizationError: The parts have no common format.
    """
    parts = _with_same_scales([part.take() for part in parts])
    first = parts[0]
    for part in parts[1:]:
        if (part.weight.format, part.input) != (first.weight.format, first.input):
            raise QuantizationError(
                f"parts of one layer here have the formats {first.weight.format} with input "
                f"{first.input} and {part.weight.format} with input {part.input}; read it "
                "dequantised"
            )
        if not _are_equal(part.input_scale, first.input_scale):
            raise QuantizationError(
                "parts of one layer here have different factors of their input's features "
                "(pre_quant_scale); read it dequantised"
            )
    order = torch.argsort(rows)
    weights = [part.weight for part in parts]
    joined = {
        name: torch.cat([getattr(weight, name) for weight in weights])[order]
        for name in ("data", "scale", "zero")
        if getattr(first.weight, name) is not None
        and (name == "data" or first.weight.format.group != "tensor")
    }
    steps = [part.step for part in parts if part.step is not None]
    step = torch.stack(steps).amax(0) if steps else None
    return replace(first, weight=replace(first.weight, **joined), step=step)


def _are_equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def _with_same_scales(parts: Sequence[StoredLinear]) -> list[StoredLinear]:
    first = parts[0].weight
    levels = [part.weight.level for part in parts]
    for level in levels:
        if level is not None and first.level is not None and not torch.equal(level, first.level):
            raise QuantizationError(
                "parts of one layer here have different scales above the scales of their blocks, "
                "which no common format can hold; read it dequantised"
            )
    if first.format.group != "tensor":
        return list(parts)
    if all(torch.equal(part.weight.scale, first.scale) for part in parts):
        return list(parts)
    return [replace(part, weight=by_channel(part.weight)) for part in parts]


def by_channel(weight: QuantizedWeight) -> QuantizedWeight:
    """Return the weight with a scale for each output instead of one for the tensor."""
    if weight.format.group != "tensor":
        return weight
    rows = weight.shape[0]
    zero = None if weight.zero is None else weight.zero.expand(rows, 1).contiguous()
    return replace(
        weight,
        scale=weight.scale.expand(rows, 1).contiguous(),
        zero=zero,
        format=replace(weight.format, group="channel"),
    )


def integer_weight(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> QuantizedWeight:
    """Return a weight from unsigned codes and zero points; None stands for the middle.

    The weight is symmetric if every zero point is the middle.

    Shape:
        codes: uint8 [out, in]. scale, zero: [out, groups].

    Raises:
        QuantizationError: The groups do not divide the inputs, or a scale is not finite.
    """
    if bits == 4 and codes.shape[1] % 2:
        raise QuantizationError(
            f"{codes.shape[1]} inputs can't be stored two to a byte; read it dequantised"
        )
    middle = 1 << (bits - 1)
    symmetric = zero is None or bool((zero == middle).all())
    format = WeightFormat(
        type="int8" if bits == 8 else "int4",
        group=group_of(scale, codes.shape[1]),
        symmetric=symmetric,
    )
    check_scales("a scale", scale)
    data = codes[:, ::2] | (codes[:, 1::2] << 4) if bits == 4 else codes
    if bits == 8 and symmetric:
        data = (codes.to(torch.int16) - middle).to(torch.int8)
    near = scale.to(torch.bfloat16)  # as kernels want it, if that is exact
    return QuantizedWeight(
        data=data,
        scale=near if torch.equal(near.to(scale.dtype), scale) else scale.float(),
        zero=None if symmetric or zero is None else zero.to(torch.uint8),
        format=format,
        columns=codes.shape[1],
    )


def group_of(scale: Tensor, columns: int) -> int | Literal["channel"]:
    """Return the group of a `WeightFormat` whose scales have this shape.

    Raises:
        QuantizationError: The groups do not divide the inputs.
    """
    groups = scale.shape[1]
    if groups == 1:
        return "channel"
    if columns % groups or columns // groups < 2:
        raise QuantizationError(f"{groups} groups do not divide {columns} inputs; restore the file")
    return columns // groups


def needed(tensors: Mapping[str, Tensor], *names: str) -> list[Tensor]:
    """Return tensors of a layer by name.

    Raises:
        QuantizationError: A tensor is missing.
    """
    for name in names:
        if name not in tensors:
            raise QuantizationError(
                f"{name} is missing beside {', '.join(sorted(tensors))}; restore the file"
            )
    return [tensors[name] for name in names]


def check_e4m3(name: str, tensor: Tensor) -> None:
    """Raise QuantizationError unless a tensor is of fp8's dtype."""
    if tensor.dtype != torch.float8_e4m3fn:
        raise QuantizationError(f"{name} is {tensor.dtype}, and torch.float8_e4m3fn is needed")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise QuantizationError unless a tensor has this shape."""
    if tuple(tensor.shape) != shape:
        raise QuantizationError(
            f"{name} has the shape {list(tensor.shape)}, and {list(shape)} is needed"
        )


def check_scales(name: str, scale: Tensor, *, may_be_zero: bool = True) -> None:
    """Raise QuantizationError unless all scales are finite and not negative.

    Args:
        name: Name of the scales, for the message.
        scale: The scales, of a floating dtype.
        may_be_zero: Whether a group without values may have a scale of 0.
    """
    if not bool(scale.isfinite().all()):
        problem = "is not finite"
    elif bool((scale < 0).any()):
        problem = "is negative"
    elif not may_be_zero and bool((scale == 0).any()):
        problem = "is 0"
    else:
        return
    raise QuantizationError(f"{name} {problem}, which no layout writes; restore the file")
