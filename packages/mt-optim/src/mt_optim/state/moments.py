"""Moments in a narrower format than their masters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_FORMATS: dict[str, torch.dtype | None] = {
    "full": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
MOMENTS_DTYPES = tuple(_FORMATS)
_BLOCK = 256  # elements that share a scale
_SCALE = "_scale"


class MomentStorage:
    """Storage of a state's moments in a format; rules see them in the masters' dtype.

    fp16 and fp8 (e4m3) have a power-of-two scale for each 256 elements in memory order, since
    gradients, and even more their squares, are far below the range of these formats. A value that
    is read and stored again does not change. The square of a small gradient never becomes zero,
    which would make the step of Adam infinite: it becomes the smallest number of its block.

    Args:
        name: full (as the masters), fp32, bf16, fp16 or fp8.

    Attributes:
        has_format: Whether moments may be kept in another dtype than the masters'.
        is_scaled: Whether the format has scales.

    Raises:
        ValueError: There is no such format.
    """

    def __init__(self, name: str = "full") -> None:
        if name not in _FORMATS:
            raise ValueError(
                f"moments_dtype must be one of {', '.join(MOMENTS_DTYPES)}; got {name!r:.60}"
            )
        self._dtype = _FORMATS[name]
        self.has_format = self._dtype is not None
        self.is_scaled = name in ("fp16", "fp8")

    def converts(self, dtype: torch.dtype) -> bool:
        """Whether moments of masters of this dtype are kept in another one."""
        return self._dtype is not None and self._dtype != dtype

    def pack(self, key: str, value: Tensor) -> dict[str, Tensor]:
        """Return the tensors to keep for a moment, by name."""
        if self._dtype is None or value.dtype == self._dtype:
            return {key: value}
        if not self.is_scaled:
            return {key: value.to(self._dtype)}
        kept, scales = _quantize(value, self._dtype, is_square=key.endswith("_sq"))
        return {key: kept, key + _SCALE: scales}

    def unpack(self, key: str, state: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return a moment in a dtype; the kept tensor itself if it already has this dtype."""
        kept = state[key]
        if key + _SCALE not in state:
            return kept.to(dtype)
        blocks = _blocks(kept.to(torch.float32)) * state[key + _SCALE].unsqueeze(1)
        return blocks.flatten()[: kept.numel()].view(kept.shape).to(dtype)

    def opened(
        self, state: dict[str, Tensor], keys: Iterable[str], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return a state with its moments in a dtype, for a rule to update."""
        return {**state, **{key: self.unpack(key, state, dtype) for key in keys}}

    def write(self, state: dict[str, Tensor], key: str, value: Tensor) -> None:
        """Write a new value into the existing tensors."""
        if state[key] is not value:
            for name, kept in self.pack(key, value).items():
                state[name].copy_(kept)


def _blocks(x: Tensor) -> Tensor:
    flat = x.flatten()
    missing = -flat.numel() % _BLOCK
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, _BLOCK)


def _quantize(x: Tensor, dtype: torch.dtype, *, is_square: bool) -> tuple[Tensor, Tensor]:
    """Return the elements in units of their block's scale, and the scales in fp32."""
    limit = torch.finfo(dtype)
    bits = math.ceil(math.log2(limit.max))
    blocks = _blocks(x.to(torch.float32))
    largest = blocks.abs().amax(1)
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - bits + (torch.ldexp(mantissa, torch.tensor(bits)) > limit.max).int()
    # Both the scale and its inverse have to be numbers of fp32.
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(-126, 126))
    scale = torch.where(torch.isfinite(largest), scale, largest)
    units = blocks / scale.unsqueeze(1)
    if is_square:
        units = torch.where(units > 0, units.clamp(min=limit.smallest_normal * limit.eps), units)
    units = units.clamp(-limit.max, limit.max)  # torch 2.11 makes NaN of more, and newer ones don't
    return units.flatten()[: x.numel()].view(x.shape).to(dtype), scale
