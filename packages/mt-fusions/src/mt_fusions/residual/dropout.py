"""Which elements dropout keeps: bits that depend on a key and a counter, and on nothing else."""

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
    """The first of 2^24 numbers that is kept: where its share reaches the probability in fp32."""
    (rounded,) = struct.unpack("f", struct.pack("f", probability))
    return math.ceil(rounded * 2**24)


def scale(probability: float, dtype: torch.dtype) -> float:
    """What kept elements are multiplied by, divided in a dtype."""
    return float(torch.ones((), dtype=dtype).div_(1 - probability))
