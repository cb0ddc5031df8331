"""Random bits that depend on a seed and an element's place, and on no generator's state.

They are those of `random_uniform` of mt-parallel-state, a sibling that this package does not
import: the same mixing in the manner of splitmix64 (Steele, Lea & Flood, 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64
_FLIP = 0x5851F42D4C957F2D
_SPREAD = 0xD6E8FEB86659FD93 - 2**64


def random_bits(seed: int | Tensor, index: Tensor) -> Tensor:
    """Return 24 random bits for each int64 of `index`, as int64.

    Args:
        seed: 63 bits; or a tensor of them, int64 [].
        index: int64 counters.

    Shape:
        index: any. Returns the same.
    """
    words = seed_words(seed, index.device)
    z = index * GOLDEN + words[0]
    z ^= _shift(z, 30)
    z *= MIX_1
    z ^= words[1]
    z ^= _shift(z, 27)
    z *= MIX_2
    return _shift(z, 40)


def seed_words(seed: int | Tensor, device: torch.device) -> Tensor:
    """Return the two words that a seed puts into the mixing, int64 [2]."""
    if not isinstance(seed, Tensor):
        seed = torch.tensor(seed, dtype=torch.int64, device=device)
    return torch.stack((seed, (seed ^ _FLIP) * _SPREAD))


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right logically: torch's is arithmetic, so the sign bits are masked off."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
