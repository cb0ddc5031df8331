"""Rounding of elements to a format: to the nearest, ties to the even code, or at random."""

from __future__ import annotations

import torch
from mt_kernels import random_bits
from torch import Tensor

from mt_fp8.format import Format

# Codes of e2m1 are 0, 0.5, 1, 1.5, 2, 3, 4, 6. Between two lies a tie, which goes to the even code.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


def encode(x: Tensor, form: Format) -> Tensor:
    """Round fp32 numbers to the nearest codes, ties to even; larger numbers become the maximum.

    NaN becomes the positive NaN of the format; e2m1 has none, and 0 stands there.

    Shape:
        x: [..., n]. Returns [..., n] of the format's dtype, or [..., ceil(n / 2)] of uint8 for
            e2m1: the even column in the low half.
    """
    x = torch.nan_to_num(x, nan=torch.nan, posinf=form.max, neginf=-form.max)
    x = x.clamp(-form.max, form.max)  # a cast of more makes NaN of e4m3 in torch 2.11
    return x.to(form.dtype) if form.per_byte == 1 else _pack(_nibbles(x))


def decode(data: Tensor, form: Format, columns: int) -> Tensor:
    """Return the fp32 values of codes, given the number of elements in a row."""
    if form.per_byte == 1:
        return data.to(torch.float32)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=data.device)
    table = torch.cat((table, -table))
    pairs = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    return table[pairs[..., :columns].to(torch.int64)]


def round_randomly(x: Tensor, form: Format, seed: int | Tensor, index: Tensor) -> Tensor:
    """Round fp32 numbers up or down to numbers of a format, so that the mean is what they were.

    The upper one is taken where 24 random bits of `seed` and the element's index are less than its
    share of the step.

    Shape:
        x, index: the same.
    """
    x = x.clamp(-form.max, form.max)
    exponent = ((x.view(torch.int32) >> 23) & 0xFF) - 127
    exponent = exponent.clamp_min(form.lowest) - form.mantissa
    step = ((exponent + 127) << 23).view(torch.float32)
    count = x.abs() / step  # exact: steps are powers of two
    lower = count.floor()
    share = random_bits(seed, index).to(torch.float32) * 2.0**-24
    # NaN compares false, and keeps itself.
    return torch.copysign((lower + (share < count - lower)) * step, x)


def _nibbles(x: Tensor) -> Tensor:
    size = x.abs()
    code = sum((size > tie).to(torch.uint8) for tie in _TIES_DOWN)
    code = code + sum((size >= tie).to(torch.uint8) for tie in _TIES_UP)
    return code + (torch.signbit(x) & ~x.isnan()).to(torch.uint8) * 8


def _pack(codes: Tensor) -> Tensor:
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
