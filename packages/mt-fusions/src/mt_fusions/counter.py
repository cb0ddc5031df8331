"""Which elements dropout keeps: bits that depend on a key and a counter, and on nothing else.

They are those of `random_uniform` of mt-parallel-state, a sibling that this package does not
import: the same mixing in the manner of splitmix64 (Steele, Lea & Flood, 2014), of which 24 bits
count.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


def kept(index: Tensor, probability: float, key: int) -> Tensor:
    """Whether each element is kept.

    Args:
        index: int64 counters.
        probability: Of being dropped.
        key: 63 bits.

    Shape:
        index: any. Returns the same, of bool.
    """
    first, second = key_words(key)
    z = index * GOLDEN
    z += first
    z ^= _shift(z, 30)
    z *= MIX_1
    z ^= second
    z ^= _shift(z, 27)
    z *= MIX_2
    return _shift(z, 40) >= threshold(probability)


def key_words(key: int) -> tuple[int, int]:
    """The two words that a key puts into the mixing, as signed 64-bit integers."""
    return _signed(key), _signed((key ^ 0x5851F42D4C957F2D) * 0xD6E8FEB86659FD93)


def threshold(probability: float) -> int:
    """The first of 2^24 numbers that is kept: where its share reaches the probability in fp32."""
    (rounded,) = struct.unpack("f", struct.pack("f", probability))
    return math.ceil(rounded * 2**24)


def scale(probability: float, dtype: torch.dtype) -> float:
    """What kept elements are multiplied by, divided in a dtype."""
    return float(torch.ones((), dtype=dtype).div_(1 - probability))


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right logically: torch's is arithmetic, so the sign bits are masked off."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
