"""Scales and factors of a block, from its largest magnitude."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from mt_fp8.format import FORMATS, Format
from mt_fp8.scaling import Scaling

# A factor and its inverse have to be normal numbers of fp32; for two levels also their products
# with an e4m3, which goes down to 2^-9.
_LARGEST = 2.0**126
_LARGEST_OF_TWO = 2.0**112
_BLOCK_SCALE = FORMATS["e4m3"]
SCALE_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "fp32": torch.float32,
        "pow2": torch.float32,
        "e8m0": torch.float8_e8m0fnu,
        "nvfp4": torch.float8_e4m3fn,
    }
)


def factor_of(amax: Tensor, scaling: Scaling) -> Tensor:
    """Return the factor of the elements in fp32, max / amax; 1 where amax is 0 or not finite.

    For e8m0 the factor is the inverse of `scale_of`'s scale; for nvfp4 it is the factor of the
    whole tensor, 448 * 6 / amax, whose blocks have `nvfp4_scales`.

    Shape:
        amax: any, of fp32. Returns the same.
    """
    amax = known(amax).clamp_min(scaling.eps)
    if scaling.scale == "e8m0":
        return _e8m0_factor(_e8m0_exponent(amax, scaling))
    if scaling.scale == "nvfp4":
        factor = _over(scaling.elements.max * _BLOCK_SCALE.max, amax).clamp_max(_LARGEST_OF_TWO)
    else:
        factor = _over(scaling.elements.max, amax).clamp_max(_LARGEST)
        if scaling.scale == "pow2":  # rounded down: the bits of the mantissa go
            factor = (factor.view(torch.int32) & 0x7F800000).view(torch.float32)
        factor = (factor * 2.0**-scaling.margin).clamp_min(1 / _LARGEST)
    return torch.where(amax > 0, factor, 1.0)


def scale_of(factor: Tensor, scaling: Scaling) -> Tensor:
    """Return what codes are multiplied by, in the dtype it is kept in: the inverse of a factor."""
    if scaling.scale != "e8m0":
        return _over(1.0, factor)
    exponent = 254 - (factor.view(torch.int32) >> 23)
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu)


def nvfp4_scales(amax: Tensor, total: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Return the e4m3 scales of blocks, and in fp32 what their elements are multiplied by.

    Args:
        amax: Largest magnitudes of the blocks.
        total: The tensor's factor.
        scaling: Scaling of the tensor.
    """
    amax = amax.clamp_min(scaling.eps)
    share = amax / torch.full_like(amax, scaling.elements.max) * total
    scales = share.clamp_max(_BLOCK_SCALE.max).to(_BLOCK_SCALE.dtype)
    step = scales.to(torch.float32) * _over(1.0, total)
    return scales, torch.where(step > 0, _over(1.0, step), 0.0)


def known(amax: Tensor) -> Tensor:
    """Return largest magnitudes with 0 for what is not finite."""
    return torch.nan_to_num(amax.to(torch.float32), nan=0.0, posinf=0.0, neginf=0.0)


def _over(number: float, x: Tensor) -> Tensor:
    """Divide with one rounding; torch multiplies a number of Python with the inverse instead."""
    return torch.full_like(x, number) / x


def _e8m0_exponent(amax: Tensor, scaling: Scaling) -> Tensor:
    """Return the scale's exponent: log2(amax / max) rounded up, or amax's exponent minus max's."""
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - 127 - scaling.elements.highest
    if scaling.exponent == "up":
        exponent += ((bits & 0x7FFFFF) > _mantissa_of_max(scaling.elements)).to(torch.int32)
    return (exponent + scaling.margin).clamp(-127, 127)


def _mantissa_of_max(form: Format) -> int:
    return round((form.max / 2.0**form.highest - 1) * 2**23)


def _e8m0_factor(exponent: Tensor) -> Tensor:
    return ((127 - exponent) << 23).view(torch.float32)
