"""Quantised weights: packed codes with scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from mt_files import check_type
from torch import Tensor

from mt_quant.error import QuantizationError
from mt_quant.formats.format import BLOCKS, WeightFormat
from mt_quant.formats.grid import Grid, find_grid, grid_of, inverse, nearest, to_codes

if TYPE_CHECKING:
    from mt_fp8 import QTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """Codes of a weight with their scales and zero points.

    Attributes:
        data: Codes: int8, uint8 for an asymmetric format, or the bytes of floats as uint8. Codes of
            4 bits are packed two to a byte, the even column in the low bits; a symmetric int4 is
            stored plus 8.
        scale: Scales: bf16 for integers, fp32 for fp8, and for blocks the bytes of e8m0 or e4m3
            (nvfp4) as uint8.
        zero: uint8 zero points of an asymmetric format, otherwise None.
        format: Number format of the codes.
        columns: Number of inputs of the weight.
        level: For nvfp4, the factor of all its scales, fp32 [1, 1]; otherwise None.

    Shape:
        data: [out, in], or [out, in / 2] for 4 bits. scale, zero: [out, groups], or [1, 1] for a
        single scale.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor | None
    format: WeightFormat
    columns: int
    level: Tensor | None = None

    @classmethod
    def empty(
        cls, rows: int, columns: int, format: WeightFormat, *, device: torch.device | None = None
    ) -> QuantizedWeight:
        """Return the codes of a weight with these numbers of outputs and inputs, without values.

        Raises:
            QuantizationError: The groups do not divide the inputs.
        """
        groups = columns // format.group_size(columns)
        scales = (1 if format.group == "tensor" else rows, groups)
        kinds = {"fp8": torch.float32} | dict.fromkeys(BLOCKS, torch.uint8)
        signed = format.type == "int8" and format.symmetric

        def make(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            data=make((rows, columns * format.bits // 8), torch.int8 if signed else torch.uint8),
            scale=make(scales, kinds.get(format.type, torch.bfloat16)),
            zero=None if format.symmetric else make(scales, torch.uint8),
            level=make((1, 1), torch.float32) if format.type == "nvfp4" else None,
            format=format,
            columns=columns,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and of inputs."""
        return self.data.shape[0], self.columns

    @property
    def nbytes(self) -> int:
        """Size of codes, scales and zero points in bytes."""
        tensors = (self.data, self.scale, self.zero, self.level)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def grid(self) -> Grid:
        """The grid on which the codes lie."""
        if not self.format.is_integer:
            return grid_of(self.as_qtensor(), self.format)
        zero = None if self.zero is None else self.zero.float()
        return Grid(format=self.format, scale=self.scale.float(), zero=zero, columns=self.columns)

    def as_qtensor(self) -> QTensor:
        """Return codes and scales of a float format as a tensor of mt-fp8."""
        from mt_fp8 import QTensor  # only floats need it

        scaling = self.format.scaling
        tensors = {"data": self.data, "scales": self.scale}
        if self.format.group == "tensor":
            tensors["scales"] = self.scale.view(())
        if self.level is not None:
            tensors["global_scale"] = self.level.view(())
        return QTensor.from_tensors(tensors, scaling=scaling, dtype=torch.float32, shape=self.shape)

    def codes(self) -> Tensor:
        """Return the unpacked codes: integers of the format's range, or bits of floats.

        Shape:
            Returns [out, in], int8 or uint8.
        """
        codes = self.data if self.format.bits == 8 else _unpack(self.data)
        return codes.to(torch.int8) - 8 if _has_offset(self.format) else codes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values, computed in fp32 and rounded once.

        Shape:
            Returns [out, in].
        """
        if not self.format.is_integer:
            return self.as_qtensor().dequantize(dtype)
        # bf16 holds codes and scales exactly, so the product is rounded once there too.
        wide = dtype if dtype in (torch.bfloat16, torch.float64) else torch.float32
        groups = self.codes().to(wide).unflatten(1, (self.scale.shape[1], -1))
        if self.zero is not None:
            groups -= self.zero[..., None].to(wide)
        return groups.mul_(self.scale[..., None].to(wide)).flatten(1).to(dtype)

    def take(self, rows: Tensor | None = None, columns: Tensor | None = None) -> QuantizedWeight:
        """Return the weight of selected outputs and inputs, by index, with their scales.

        Raises:
            QuantizationError: The columns cut a group of inputs that share a scale.
        """
        codes, scale, zero = self.codes(), self.scale, self.zero
        if rows is not None:
            codes = codes[rows]
            if self.format.group != "tensor":
                scale, zero = scale[rows], None if zero is None else zero[rows]
        if columns is not None:
            codes = codes[:, columns]
            if isinstance(self.format.group, int):
                index = _whole_groups(columns, self.format.group_size(self.columns))
                scale, zero = scale[:, index], None if zero is None else zero[:, index]
        return replace(
            self,
            data=_pack(codes, self.format).contiguous(),
            scale=scale.contiguous(),
            zero=None if zero is None else zero.contiguous(),
            columns=codes.shape[1],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedMatrix:
    """Result of a method for the weight of one linear layer.

    Attributes:
        weight: The quantised weight.
        input_scale: Factors of the input's features, applied before the product; None for none.
        low_rank: Factors `down` and `up` of an additional product in full precision, or None.

    Shape:
        input_scale: [in]. down: [rank, in]. up: [out, rank].
    """

    weight: QuantizedWeight
    input_scale: Tensor | None = None
    low_rank: tuple[Tensor, Tensor] | None = None

    def dequantize(self) -> Tensor:
        """Return the matrix by which the layer multiplies its input, in fp32.

        Shape:
            Returns [out, in].
        """
        whole = self.weight.dequantize()
        if self.low_rank is not None:
            down, up = self.low_rank
            whole = whole + up.float() @ down.float()
        return whole if self.input_scale is None else whole * self.input_scale.float()

    def take(self, rows: Tensor | None = None, columns: Tensor | None = None) -> QuantizedMatrix:
        """Return the matrix of selected outputs and inputs; see `QuantizedWeight.take`."""
        scale, low_rank = self.input_scale, self.low_rank
        if columns is not None:
            scale = None if scale is None else scale[columns]
            low_rank = None if low_rank is None else (low_rank[0][:, columns], low_rank[1])
        if rows is not None and low_rank is not None:
            low_rank = low_rank[0], low_rank[1][rows]
        weight = self.weight.take(rows, columns)
        return QuantizedMatrix(weight=weight, input_scale=scale, low_rank=low_rank)


def encode(values: Tensor, grid: Grid) -> QuantizedWeight:
    """Return values as codes of a grid; exact where the values lie on the grid.

    Shape:
        values: [out, in].
    """
    format = grid.format
    if not format.is_integer:
        data = nearest(
            values.float() * inverse(grid.of_columns(0, values.shape[1])[0]), format
        ).data
        return QuantizedWeight(
            data=data.view(torch.uint8),
            scale=_stored_scale(grid),
            zero=None,
            format=format,
            columns=values.shape[1],
            level=grid.level,
        )
    codes = to_codes(values, grid).to(torch.int8 if format.symmetric else torch.uint8)
    return QuantizedWeight(
        data=_pack(codes, format),
        scale=grid.scale.to(torch.bfloat16),
        zero=None if grid.zero is None else grid.zero.to(torch.uint8),
        format=format,
        columns=values.shape[1],
    )


def quantize_weight(weight: Tensor, format: WeightFormat | str) -> QuantizedWeight:
    """Round a weight to the nearest values of a format.

    Args:
        weight: Any floating dtype; computed in fp32.
        format: Number format, or its name, such as `int4-g64`.

    Shape:
        weight: [out, in].

    Raises:
        QuantizationError: The format is unknown or does not fit, or the weight is not finite.

    Example:
        >>> import torch
        >>> q = quantize_weight(torch.eye(4), "int8")
        >>> q.nbytes, bool((q.dequantize() == torch.eye(4)).all())
        (24, False)
    """
    check_type("weight", weight, Tensor)
    chosen = WeightFormat.named(format) if isinstance(format, str) else format
    check_type("format", chosen, WeightFormat)
    weight = weight.detach()
    if chosen.bits == 4 and weight.dim() == 2 and weight.shape[1] % 2:
        raise QuantizationError(
            f"{weight.shape[1]} inputs can't be stored two to a byte ({chosen}); use int8"
        )
    grid = find_grid(weight, chosen)
    # Integers are rounded on their grid; floats must have the bits of mt-fp8.
    if chosen.is_integer:
        return encode(weight, grid)
    from mt_fp8 import quantize  # only floats need it

    made = quantize(weight.float(), chosen.scaling)  # the bits of mt-fp8, also in a tie
    return replace(encode(weight, grid), data=made.data.view(torch.uint8))


def _has_offset(format: WeightFormat) -> bool:
    """Whether signed codes are stored with an offset, from 0."""
    return format.type == "int4" and format.symmetric


def _pack(codes: Tensor, format: WeightFormat) -> Tensor:
    if format.bits == 8:
        return codes
    codes = (codes + 8 if _has_offset(format) else codes).to(torch.uint8)
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _unpack(data: Tensor) -> Tensor:
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def _stored_scale(grid: Grid) -> Tensor:
    """Return the scales of a float format as they are stored."""
    kind = grid.format.scaling.scale
    if kind == "fp32":
        return grid.scale
    scale = grid.scale if grid.level is None else grid.scale / grid.level
    dtype = torch.float8_e8m0fnu if kind == "e8m0" else torch.float8_e4m3fn
    return scale.to(dtype).view(torch.uint8)


def _whole_groups(columns: Tensor, size: int) -> Tensor:
    """Return the index of each group in `columns`, which must be whole groups."""
    if len(columns) % size == 0:
        grouped = columns.view(-1, size)
        if bool((grouped == grouped[:, :1] + torch.arange(size, device=columns.device)).all()):
            first = grouped[:, 0]
            if bool((first % size == 0).all()):
                return first // size
    raise QuantizationError(
        f"a rank's {len(columns)} inputs cut groups of {size} that share a scale; use groups that "
        "divide the inputs of each rank"
    )
