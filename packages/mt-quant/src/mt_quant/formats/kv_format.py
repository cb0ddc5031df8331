"""Number formats of an attention cache."""

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
    """Number format of the keys and values in an attention cache.

    Attributes:
        type: Element type: `fp8` is e4m3, up to 448; `int8` is symmetric, up to 127.
        group: Elements that share a scale. With `token`, each head of each token has a scale,
            computed from its largest magnitude when it is written. With `head` (each head of a
            layer) and `tensor` (all keys, all values) the scales are static, from calibration.

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
        """Return a format by name: `fp8` or `int8`, `fp8-head`, `int8-tensor` and so on.

        Raises:
            QuantizationError: The name is unknown.
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
        """Whether the scales come from calibration."""
        return self.group != "token"

    @property
    def limit(self) -> float:
        """Largest value of a code."""
        return _INT8_MAX if self.type == "int8" else _E4M3_MAX

    @property
    def dtype(self) -> torch.dtype:
        """Torch dtype of the codes."""
        return torch.int8 if self.type == "int8" else torch.float8_e4m3fn

    def encode(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the nearest codes, saturated, and their scales.

        A non-finite value saturates, or makes all values of its head and token non-finite.

        Args:
            x: Keys or values.
            scale: The static scales; None for a format that computes a scale for each token.

        Shape:
            x: [..., heads, D]. scale: fp32 [heads]. Returns `dtype` [..., heads, D], and fp32
            [..., heads, 1], or the static scales as [heads, 1].

        Raises:
            CalibrationError: The format needs static scales, and there are none.
            QuantizationError: The number of scales is not the number of heads, or scales are given
                for a format that computes its own.
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
        """Return the values of codes; the scales broadcast.

        Shape:
            codes: as `encode` returns them, or with other dims before D, and scales to match.
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
