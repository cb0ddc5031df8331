"""Random bits that depend on a key and a counter, and on no generator's state.

The mixing follows splitmix64 (Steele, Lea & Flood, 2014), with the key as two words. It uses 64-bit
integer arithmetic only, so the bits are equal on every device and for every sharding of a tensor. A
Triton kernel repeats the steps with the same constants.
"""

from __future__ import annotations

from typing import overload

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64
_FLIP = 0x5851F42D4C957F2D
_SPREAD = 0xD6E8FEB86659FD93 - 2**64


def random_bits(key: int | Tensor, index: Tensor, *, bits: int = 24) -> Tensor:
    """Return random bits for each counter.

    Args:
        key: A 63-bit integer, or an int64 tensor [] for a graph to replay with other keys.
        index: int64 counters, for example the global element index. Not modified.
        bits: Number of bits, up to 64.

    Shape:
        index: any. Returns the same shape, int64 in [0, 2**bits).
    """
    # The key enters twice, through different words. Were it only added to the counter, two keys
    # could yield one sequence shifted against the other.
    first, second = key_words(key)
    z = index * GOLDEN
    z += first
    z ^= _shift(z, 30)
    z *= MIX_1
    z ^= second
    z ^= _shift(z, 27)
    z *= MIX_2
    if bits > 33:  # the last xor-shift only reaches the low 33 bits
        z ^= _shift(z, 31)
    return _shift(z, 64 - bits)


@overload
def key_words(key: int) -> tuple[int, int]: ...
@overload
def key_words(key: Tensor) -> tuple[Tensor, Tensor]: ...
@overload
def key_words(key: int | Tensor) -> tuple[int, int] | tuple[Tensor, Tensor]: ...
def key_words(key: int | Tensor) -> tuple[int, int] | tuple[Tensor, Tensor]:
    """Return the two words through which a key enters, as signed 64-bit integers."""
    if isinstance(key, Tensor):  # whose int64 arithmetic wraps around
        return key, (key ^ _FLIP) * _SPREAD
    return _signed(key), _signed((key ^ _FLIP) * _SPREAD)


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right logically: torch's is arithmetic, so the sign bits are masked off."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
