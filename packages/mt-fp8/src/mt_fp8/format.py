"""The formats of elements: how many bits, how large, and which dtype holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True, kw_only=True)
class Format:
    """A small binary floating-point format.

    Attributes:
        name: As in `Scaling.format`.
        dtype: Dtype of the tensor of codes; e2m1 has two codes in a byte.
        max: The largest finite value.
        mantissa: Bits after the point.
        lowest: The exponent of the smallest normal number; below it steps stay equal.
        highest: The exponent of `max`.
        per_byte: Codes in a byte.
    """

    name: str
    dtype: torch.dtype
    max: float
    mantissa: int
    lowest: int
    highest: int
    per_byte: int = 1

    @property
    def has_nan(self) -> bool:
        """Whether a code stands for NaN."""
        return self.per_byte == 1


_FORMATS = (
    Format(name="e4m3", dtype=torch.float8_e4m3fn, max=448.0, mantissa=3, lowest=-6, highest=8),
    Format(name="e5m2", dtype=torch.float8_e5m2, max=57344.0, mantissa=2, lowest=-14, highest=15),
    Format(name="e2m1", dtype=torch.uint8, max=6.0, mantissa=1, lowest=0, highest=2, per_byte=2),
)
FORMATS: Mapping[str, Format] = MappingProxyType({form.name: form for form in _FORMATS})
