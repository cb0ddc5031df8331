"""The mask of dropout, a function of a key and of counters alone."""

from __future__ import annotations

import math
import struct

import torch
from mt_kernels import random_bits
from torch import Tensor


def kept(index: Tensor, probability: float, key: int) -> Tensor:
    """Return whether each element is kept.

    Args:
        index: int64 counters.
        probability: Probability that an element is dropped.
        key: 63 bits.

    Shape:
        index: any. Returns the same, of bool.
    """
    return random_bits(key, index) >= threshold(probability)


def threshold(probability: float) -> int:
    """Return the lowest 24-bit number of a kept element, for a probability rounded to fp32."""
    (rounded,) = struct.unpack("f", struct.pack("f", probability))
    return math.ceil(rounded * 2**24)


def scale(probability: float, dtype: torch.dtype) -> float:
    """Return the factor of kept elements, computed in a dtype."""
    return float(torch.ones((), dtype=dtype).div_(1 - probability))
