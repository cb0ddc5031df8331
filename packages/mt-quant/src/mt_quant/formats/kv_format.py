"""Formats of the keys and values that attention keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch
from mt_files import Checks, did_you_mean
from torch import Tensor

from mt_quant.error import CalibrationError, QuantizationError

KVType = Literal["fp8", "int8"]
KVGroup = Literal["token", "head", "tensor"]
_INT8_MAX, _E4M3_MAX = 127.0, 448.0


@dataclass(frozen=True, kw_only=True)
class KVFormat:
    """How the keys and values that attention keeps are stored.

    Attributes:
        type: Of a code: `fp8` is e4m3, to 448; int8 is symmetric, to 127.
        group: What shares a scale. Each head of each `token`: the scale is made of its largest
            magnitude when it is written. Or each `head` of a layer, or all its keys and all its
            values (`tensor`): these scales are static, from calibration.

    Example:
        >>> str(KVFormat.named("fp8"))
        'fp8-token'

    Raises:
        FieldError: A value is out of range.
    """

    type: KVType
    group: KVGroup = "token"

    def __post_init__(self) -> None:
        Checks(self).done()

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the format of a name: `fp8` or `int8`, `fp8-head`, `int8-tensor` and so on.

        Raises:
            QuantizationError: There is none of this name.
        """
        kind, _, group = name.partition("-")
        for known in get_args(KVType):
            for each in get_args(KVGroup):
                if (kind, group or "token") == (known, each):
                    return cls(type=known, group=each)
        names = [f"{k}{g}" for k in get_args(KVType) for g in ("", "-head", "-tensor")]
        raise QuantizationError(
            f"unknown format of keys and values {name!r}. {did_you_mean(name, names)}"
        )

    def __str__(self) -> str:
        return f"{self.type}-{self.group}"

    @property
    def is_static(self) -> bool:
        """Whether scales are from calibration."""
        return self.group != "token"

    @property
    def limit(self) -> float:
        """The largest value of a code."""
        return _INT8_MAX if self.type == "int8" else _E4M3_MAX

    @property
    def dtype(self) -> torch.dtype:
        """Of a code."""
        return torch.int8 if self.type == "int8" else torch.float8_e4m3fn

    def encode(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return codes, nearest and saturated, and their scales.

        A value that is not finite saturates, or makes values of its head of its token not finite.

        Args:
            x: Keys or values.
            scale: The static scales; None where each head of each token gets its own.

        Shape:
            x: [..., heads, D]. scale: fp32 [heads]. Returns `dtype` [..., heads, D], and fp32
            [..., heads, 1], or the static scales as [heads, 1].

        Raises:
            CalibrationError: The format has static scales, and there are none.
            QuantizationError: They are not as many as the heads, or there are some for a format
                without.
        """
        if scale is not None:
            scale = self._static(x, scale)
        elif self.is_static:
            raise CalibrationError(
                f"{self} has scales from calibration, and there are none; calibrate the model, or "
                f"use {self.type}, which makes a scale for each head of each token"
            )
        if self.type == "int8":
            return _int8(x, scale)
        from mt_fp8 import Scaling, quantize  # only floats need it

        if scale is None:
            made = quantize(x, Scaling(block="row"))
            return made.data, made.scales
        return quantize(x, Scaling(block="head"), factor=1 / scale).data, scale

    def decode(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of codes; scales spread over them.

        Shape:
            codes: as `encode` gives them, or with other dims before D, and scales to match.
        """
        wide = torch.promote_types(dtype, torch.float32)
        return (codes.to(wide) * scale).to(dtype)

    def _static(self, x: Tensor, scale: Tensor) -> Tensor:
        if not self.is_static:
            raise QuantizationError(
                f"{self} makes its own scales, and static ones are given; use {self.type}-head"
            )
        if scale.shape != (x.shape[-2],):
            raise QuantizationError(
                f"scales have shape {list(scale.shape)}, and [{x.shape[-2]}] is needed: one for "
                "each head"
            )
        return scale.float()[:, None]


def _int8(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    values = x.detach().float()
    if scale is None:
        scale = values.abs().amax(-1, keepdim=True) / _INT8_MAX
        scale = torch.where(scale == 0, 1.0, scale)
    codes = (values / scale).round().clamp(-_INT8_MAX, _INT8_MAX)
    return codes.to(torch.int8), scale
