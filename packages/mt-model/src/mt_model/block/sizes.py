"""The largest sizes of a model, and the message for sizes that ranks can't share."""

from __future__ import annotations

from typing import TypeAlias

from mt_files import divisors, multiples_near

Sizes: TypeAlias = tuple[int, ...]

# Above these no parameter's size fits 64 bits, or a list of layers no memory.
MAX_WIDTH, MAX_HEADS, MAX_VOCAB, MAX_LENGTH = 1 << 24, 1 << 16, 1 << 30, 1 << 27
MAX_LAYERS = 4096  # above the deepest networks published
MAX_CLAMP = 1e30  # a bound of values in fp32


def indivisible(name: str, value: int, tp: int) -> str:
    """Say that `tp` ranks can't share a size, and name the nearest sizes that they can."""
    sizes = multiples_near(value, tp)
    smaller = max(d for d in divisors(value) if d <= tp)
    return (
        f"{name}={value} does not divide by tp={tp}. Nearest {name} that does: {sizes}; "
        f"nearest tp for {name}={value}: {smaller}"
    )
