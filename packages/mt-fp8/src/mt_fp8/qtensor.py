"""A quantised tensor: codes, scales, and what they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from mt_files import check_type, shorten
from torch import Tensor

from mt_fp8.block import in_blocks, out_of_blocks, per_block, scales_shape
from mt_fp8.element import decode
from mt_fp8.hadamard import rotate_back
from mt_fp8.scale import SCALE_DTYPES
from mt_fp8.scaling import Scaling


@dataclass(frozen=True, kw_only=True, eq=False)
class QTensor:
    """A quantised tensor: codes, scales, and what they stand for.

    Attributes:
        data: Codes in the dtype of the format; e2m1 as uint8, the even column in the low half.
        scales: Factors of the codes: fp32, e8m0, or for nvfp4 e4m3.
        scaling: Scaling of the quantisation.
        dtype: Dtype of the original tensor.
        shape: Shape of the original tensor.
        global_scale: Factor of the scales of nvfp4, fp32; else None.

    Shape:
        data: `shape`; for e2m1 its last dim is half of it, rounded up.
        scales: [] for a tensor; [..., 1] for rows; [heads, 1] for heads; [..., 1, 1] for tokens;
            and for blocks the number of blocks along each dim.
        global_scale: [].

    Raises:
        TypeError: A tensor has another dtype than its scaling says.
        ValueError: It has another shape.
    """

    data: Tensor
    scales: Tensor
    scaling: Scaling
    dtype: torch.dtype
    shape: tuple[int, ...]
    global_scale: Tensor | None = None

    def __post_init__(self) -> None:
        check_type("scaling", self.scaling, Scaling)
        check_type("dtype", self.dtype, torch.dtype)
        expected = {
            "data": (_data_shape(self.shape, self.scaling), self.scaling.elements.dtype),
            "scales": (scales_shape(self.shape, self.scaling), SCALE_DTYPES[self.scaling.scale]),
        }
        if self.scaling.scale == "nvfp4":
            expected["global_scale"] = ((), torch.float32)
        elif self.global_scale is not None:
            raise ValueError(f"scale {self.scaling.scale!r} has no global_scale; leave it out")
        for name, (shape, dtype) in expected.items():
            tensor = getattr(self, name)
            check_type(name, tensor, Tensor)
            if tensor.dtype != dtype:
                raise TypeError(f"{name} must be {dtype} for {self.scaling}, got {tensor.dtype}")
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name} must have the shape {shape} for a tensor of {self.shape}, "
                    f"got {tuple(tensor.shape)}"
                )

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def dequantize(self, dtype: torch.dtype | None = None, *, rotated: bool = False) -> Tensor:
        """Return what the codes stand for.

        Args:
            dtype: Dtype of the result; None is the original tensor's. The values are
                made in fp32 and rounded once; for fp64 they are exact products, which a number
                near the end of fp32 may need.
            rotated: Leave a rotation in, as a product of two rotated tensors takes it.

        Shape:
            Returns `shape`.
        """
        target = self.dtype if dtype is None else dtype
        wide = torch.float64 if target == torch.float64 else torch.float32
        blocks = in_blocks(self.codes().to(wide), self.scaling)
        steps = per_block(self.steps(), self.scaling).to(wide)
        values = out_of_blocks(blocks * steps, self.shape, self.scaling)
        if self.scaling.hadamard and not rotated:
            values = rotate_back(values)
        return values.to(target)

    def codes(self) -> Tensor:
        """Return the numbers that the codes are, without scales, in fp32.

        Shape:
            Returns `shape`.
        """
        return decode(self.data, self.scaling.elements, self.shape[-1] if self.shape else 1)

    def steps(self) -> Tensor:
        """Return what codes are multiplied by, with all its levels, in fp32.

        Shape:
            Returns the shape of `scales`.
        """
        scales = self.scales.to(torch.float32)
        return scales if self.global_scale is None else scales * self.global_scale

    def transposed(self) -> QTensor:
        """Return the quantised transpose of the last two dims, without quantising again.

        Raises:
            ValueError: Scales run along rows, or the tensor has one dim: there is no such thing.
        """
        if not self.scaling.is_square or len(self.shape) < 2:
            raise ValueError(
                f"a tensor of {self.shape} with {self.scaling} has no exact transpose; quantise "
                "the transpose, or use quantize_both"
            )
        if self.scaling.elements.per_byte == 1:
            data = self.data.mT.contiguous()
        else:
            data = transposed_pairs(self.data, self.shape[-1])
        scales = self.scales if self.scales.dim() < 2 else self.scales.mT.contiguous()
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return QTensor(
            data=data, scales=scales, scaling=self.scaling, dtype=self.dtype, shape=shape,
            global_scale=self.global_scale,
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by name, bytes as uint8, which any library can save or send."""
        found = {"data": self.data, "scales": self.scales}
        if self.global_scale is not None:
            found["global_scale"] = self.global_scale
        return {name: _as_bytes(tensor) for name, tensor in found.items()}

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor],
        *,
        scaling: Scaling,
        dtype: torch.dtype,
        shape: Sequence[int],
    ) -> QTensor:
        """Make one of what `tensors` gave.

        Raises:
            TypeError: A tensor has another dtype than its scaling says.
            ValueError: A tensor is missing, too many, or has another shape.
        """
        names = ["data", "scales", *(["global_scale"] if scaling.scale == "nvfp4" else [])]
        if sorted(tensors) != sorted(names):
            raise ValueError(f"tensors must be {', '.join(names)}; got {shorten(sorted(tensors))}")
        dtypes = {"data": scaling.elements.dtype, "scales": SCALE_DTYPES[scaling.scale]}
        found = {name: _of_bytes(tensors[name], dtypes.get(name)) for name in names}
        return cls(**found, scaling=scaling, dtype=dtype, shape=tuple(shape))


def transposed_pairs(data: Tensor, columns: int) -> Tensor:
    """Transpose codes of which a byte has two."""
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2)[..., :columns].mT
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _data_shape(shape: tuple[int, ...], scaling: Scaling) -> tuple[int, ...]:
    each = scaling.elements.per_byte
    return (*shape[:-1], -(-shape[-1] // each)) if shape else shape


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _of_bytes(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    is_bytes = isinstance(x, Tensor) and x.dtype == torch.uint8
    return x.view(dtype) if is_bytes and dtype is not None and dtype.itemsize == 1 else x
