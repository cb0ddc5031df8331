"""Rounding of elements in Triton, with the bits of `mt_fp8.element`."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from mt_kernels import GOLDEN, MIX_1, MIX_2

_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(word) for word in (GOLDEN, MIX_1, MIX_2))


@triton.jit
def _round_bits(x, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    # Magnitudes of fp32, not above the largest, to codes. Where steps are equal, the addition of a
    # number whose last bit is that step rounds; elsewhere half a step less one, and the last bit.
    shift: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    odd = (bits >> shift) & 1
    normal = ((bits + odd + ((1 << (shift - 1)) - 1)) >> shift) - ((126 + LOWEST) << MANTISSA)
    magic: tl.constexpr = (127 + LOWEST + shift) << 23
    number = tl.full(x.shape, magic, tl.int32).to(tl.float32, bitcast=True)
    small = (x + number).to(tl.int32, bitcast=True) - magic
    return tl.where(bits < ((127 + LOWEST) << 23), small, normal)


@triton.jit
def encode(x, FORMAT: tl.constexpr, MAX: tl.constexpr, CASTS: tl.constexpr):
    """Round fp32 numbers to codes in uint8, one in each; CASTS: by the device's own instruction."""
    is_nan = x != x
    size = tl.minimum(tl.abs(tl.where(is_nan, 0.0, x)), MAX)
    sign = tl.where((x.to(tl.int32, bitcast=True) < 0) & (is_nan == 0), 1, 0)
    if FORMAT == "e2m1":
        code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32)
        code += (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
        code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
        return (code + sign * 8).to(tl.uint8)
    if FORMAT == "e4m3":
        if CASTS:
            code = size.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        else:
            code = _round_bits(size, 3, -6)
    elif CASTS:
        code = size.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        code = _round_bits(size, 2, -14)
    return tl.where(is_nan, 0x7F, code + sign * 128).to(tl.uint8)


@triton.jit
def _shift(z, BITS: tl.constexpr):
    """Shift right logically."""
    return (z.to(tl.uint64, bitcast=True) >> BITS).to(tl.int64, bitcast=True)


@triton.jit
def round_randomly(
    x, index, word, word_2, MAX: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr
):  # fmt: skip
    """Round up or down by 24 random bits of an index; the result is a number of the format."""
    z = index * _GOLDEN + word
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = z ^ word_2
    z = (z ^ _shift(z, 27)) * _MIX_2
    share = _shift(z, 40).to(tl.float32) * (2.0**-24)
    size = tl.minimum(tl.abs(x), MAX)
    exponent = ((size.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
    exponent = tl.maximum(exponent, LOWEST) - MANTISSA
    step = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    count = size * inverse
    lower = tl.floor(count)
    rounded = (lower + (share < count - lower).to(tl.float32)) * step
    rounded = tl.where(x.to(tl.int32, bitcast=True) < 0, -rounded, rounded)
    return tl.where(x != x, x, rounded)


@triton.jit
def rotate(x, SIGNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rotate each 16 neighbours of a row, with the additions of `mt_fp8.hadamard` in its order."""
    place = tl.arange(0, COLUMNS) % 16
    factor = tl.where((SIGNS >> place) & 1 == 1, 0.0625, -0.0625)
    x = tl.where(tl.abs(x) == float("inf"), float("nan"), x) * factor[None, :]
    x = _pairs(x, 1, ROWS, COLUMNS)
    x = _pairs(x, 2, ROWS, COLUMNS)
    x = _pairs(x, 4, ROWS, COLUMNS)
    x = _pairs(x, 8, ROWS, COLUMNS)
    return x * 4.0


@triton.jit
def _pairs(x, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    apart = tl.reshape(x, (ROWS, COLUMNS // (2 * WIDTH), 2, WIDTH))
    first, second = tl.split(tl.permute(apart, (0, 1, 3, 2)))
    joined = tl.join(first + second, first - second)
    return tl.reshape(tl.permute(joined, (0, 1, 3, 2)), (ROWS, COLUMNS))
