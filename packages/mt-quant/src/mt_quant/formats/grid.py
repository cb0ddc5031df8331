"""Quantisation grids: the values that a format represents for a weight."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mt_quant.error import QuantizationError
from mt_quant.formats.format import WeightFormat

if TYPE_CHECKING:
    from mt_fp8 import QTensor


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Representable values `(code - zero) * scale` of each group of a weight.

    Attributes:
        format: Number format of the codes.
        scale: Scales in fp32. For integers they are rounded up to bf16, so that every kernel
            multiplies by the same number.
        zero: Zero points, integers in fp32; None for a symmetric format.
        columns: Number of inputs of the weight.
        level: For nvfp4, the factor of `scale` that all groups share, fp32 [1, 1]; otherwise None.

    Shape:
        scale, zero: [out, groups]; [1, 1] where the whole tensor shares them.
    """

    format: WeightFormat
    scale: Tensor
    zero: Tensor | None
    columns: int
    level: Tensor | None = None

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale."""
        return self.format.group_size(self.columns)

    def of_columns(self, start: int, count: int) -> tuple[Tensor, Tensor | None]:
        """Return scale and zero point of each column: [out, count], or broadcastable to it."""
        if self.scale.shape[1] == 1:
            return self.scale, self.zero
        size = self.group_size
        first, inside = divmod(start, size)
        groups = slice(first, -(-(start + count) // size))

        def spread(values: Tensor) -> Tensor:
            # Much faster than an index of the columns.
            whole = values[:, groups, None].expand(-1, -1, size).flatten(1)
            return whole[:, inside : inside + count]

        return spread(self.scale), None if self.zero is None else spread(self.zero)

    def with_columns(self, start: int, part: Grid) -> Grid:
        """Return this grid with another grid for the columns from `start`.

        Raises:
            ValueError: The columns begin inside a group.
        """
        first, inside = divmod(start, self.group_size)
        if inside or part.format != self.format or self.level is not None:
            raise ValueError(
                f"columns from {start} with {part.format} can't replace groups of "
                f"{self.group_size} with {self.format}; start at a multiple, with the same format, "
                "and not with nvfp4, whose groups share a level"
            )
        scale, zero = self.scale.clone(), None if self.zero is None else self.zero.clone()
        scale[:, first : first + part.scale.shape[1]] = part.scale
        if zero is not None and part.zero is not None:
            zero[:, first : first + part.zero.shape[1]] = part.zero
        return replace(self, scale=scale, zero=zero)


def find_grid(
    weight: Tensor, format: WeightFormat, *, shrink: Tensor | float | None = None
) -> Grid:
    """Return the grid that round-to-nearest uses: it covers each group's range.

    Symmetric formats scale by the largest magnitude, so that the error of an element is at most
    half a step. Asymmetric formats cover the range from the smallest to the largest value,
    including zero.

    Args:
        weight: Any floating dtype.
        format: Number format.
        shrink: Fraction of the range to keep, in (0, 1]; values outside are clipped.

    Shape:
        weight: [out, in]. shrink: [out, groups] or a number.

    Raises:
        QuantizationError: The groups do not divide the inputs, or the weight is not finite.
    """
    check_weight(weight)
    groups = _groups(weight.float(), format)
    keep = 1.0 if shrink is None else shrink
    if not format.is_integer:
        return _float_grid(groups, weight, format, shrink)
    low, high = format.codes
    if format.symmetric:
        scale = _as_scale(groups.abs().amax(-1) * keep / high)
        return Grid(format=format, scale=scale, zero=None, columns=weight.shape[1])
    bottom = groups.amin(-1).clamp(max=0) * keep
    top = groups.amax(-1).clamp(min=0) * keep
    scale = _as_scale((top - bottom) / (high - low))
    zero = (-bottom / scale).round().clamp(low, high)
    return Grid(format=format, scale=scale, zero=zero, columns=weight.shape[1])


def to_codes(values: Tensor, grid: Grid, *, start: int = 0) -> Tensor:
    """Return the codes nearest to the columns from `start` on, as fp32 numbers."""
    scale, zero = grid.of_columns(start, values.shape[1])
    if not grid.format.is_integer:
        return nearest(values.float() * inverse(scale), grid.format).dequantize()
    codes = (values.float() / scale).round()
    return (codes if zero is None else codes + zero).clamp(*grid.format.codes)


def from_codes(codes: Tensor, grid: Grid, *, start: int = 0) -> Tensor:
    """Return the values of the codes of columns from `start`, in fp32."""
    scale, zero = grid.of_columns(start, codes.shape[1])
    codes = codes.float()
    return (codes if zero is None else codes - zero) * scale


def round_to_grid(values: Tensor, grid: Grid, *, start: int = 0) -> Tensor:
    """Return the nearest values of the grid for columns from `start`, in fp32.

    Shape:
        values: [out, n]. Returns the same.
    """
    return from_codes(to_codes(values, grid, start=start), grid, start=start)


def nearest(values: Tensor, format: WeightFormat) -> QTensor:
    """Round numbers to elements of a float format, with a scale of 1."""
    from mt_fp8 import Scaling, quantize  # only floats need it

    plain = Scaling(format=format.scaling.format)
    return quantize(values, plain, factor=torch.ones((), device=values.device))


def inverse(scale: Tensor) -> Tensor:
    """Return the reciprocal of a scale; 0 for a scale of 0, whose values are all 0."""
    return torch.where(scale > 0, 1 / scale, 0.0)


def grid_of(made: QTensor, format: WeightFormat) -> Grid:
    """Return the grid of a matrix that mt-fp8 quantised."""
    rows, columns = made.shape
    level = None if made.global_scale is None else made.global_scale.view(1, 1)
    scale = made.steps()
    scale = scale.view(1, 1) if format.group == "tensor" else scale.view(rows, -1)
    return Grid(format=format, scale=scale, zero=None, columns=columns, level=level)


def _float_grid(
    groups: Tensor, weight: Tensor, format: WeightFormat, shrink: Tensor | float | None
) -> Grid:
    from mt_fp8 import quantize  # only floats need it

    values = weight.float()
    if shrink is not None:
        most = (groups.abs().amax(-1) * shrink)[..., None]
        values = groups.clamp(-most, most).view_as(weight)
    return grid_of(quantize(values, format.scaling), format)


def check_weight(weight: Tensor) -> None:
    """Refuse a weight that is not a finite matrix."""
    if weight.dim() != 2 or not weight.is_floating_point():
        raise QuantizationError(
            f"a weight of shape {tuple(weight.shape)} and {weight.dtype} is no matrix of real "
            "numbers; flatten it to [out, in]"
        )
    # One pass without a temporary; both are NaN if a value is.
    if weight.numel() and not all(map(math.isfinite, map(float, weight.aminmax()))):
        raise QuantizationError(
            f"a weight of shape {tuple(weight.shape)} has values that are not finite; repair the "
            "checkpoint, or leave the layer out with a rule"
        )


def _groups(weight: Tensor, format: WeightFormat) -> Tensor:
    """Return the weight by group: [out, groups, group], or [1, 1, all] for a single scale."""
    if format.group == "tensor":
        return weight.reshape(1, 1, -1)
    return weight.unflatten(1, (-1, format.group_size(weight.shape[1])))


def _as_scale(scale: Tensor) -> Tensor:
    """Round scales up to bf16, so that no code saturates; a scale of 0 becomes 1."""
    near = scale.to(torch.bfloat16)
    above = (near.view(torch.int16) + 1).view(torch.bfloat16)
    scale = torch.where(near.float() < scale, above, near).float()
    return torch.where(scale > 0, scale, 1.0)
