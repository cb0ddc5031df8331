"""Where each parameter's gradient lies in a flat buffer: pure arithmetic, no torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# 64 elements: every view starts on its own cache line and on a vector boundary in any dtype.
PARAM_ALIGNMENT = 64
# 128 elements times the ranks: every rank could own an equal, aligned slice of a bucket.
BUCKET_ALIGNMENT = 128


@dataclass(frozen=True, kw_only=True)
class ParamRange:
    """Elements ``[start, end)`` of the flat buffer hold one parameter's gradient.

    Attributes:
        name: The parameter's name.
        start: First element.
        end: One past the last element; ``end - start`` is the parameter's numel.
        bucket: Index of the bucket that holds it.
    """

    name: str
    start: int
    end: int
    bucket: int


@dataclass(frozen=True, kw_only=True)
class BucketRange:
    """Elements ``[start, end)`` of the flat buffer are reduced by one collective.

    Attributes:
        start: First element.
        end: One past the last element, padding included.
        unpadded: Elements from ``start`` to the end of the last parameter.
    """

    start: int
    end: int
    unpadded: int


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """The result of `plan_buckets`.

    Attributes:
        params: One range per parameter, in buffer order (last parameter first).
        buckets: One range per bucket; they follow one another without holes.
    """

    params: tuple[ParamRange, ...]
    buckets: tuple[BucketRange, ...]

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.buckets[-1].end if self.buckets else 0


def plan_buckets(
    numels: Mapping[str, int], *, bucket_size: int | None, world_size: int = 1
) -> BufferLayout:
    """Lay parameters out in a flat buffer, last parameter first, and cut it into buckets.

    Backward produces gradients roughly from the last parameter to the first, so the first bucket
    of the buffer is the first that is complete. A parameter starts at a multiple of 64 elements,
    a bucket closes once it holds at least `bucket_size` elements, and a bucket's end is padded to
    a multiple of ``lcm(world_size, 128)``. A parameter is never cut.

    Args:
        numels: Elements per parameter, in model order.
        bucket_size: Elements after which a bucket closes; None puts everything in one bucket.
        world_size: Ranks that reduce the buffer.

    Returns:
        The layout. It depends on the arguments only, so all ranks agree on it without talking.

    Raises:
        ValueError: A size is not positive.
    """
    if not isinstance(numels, Mapping):
        raise TypeError(f"numels must map names to numbers of elements, got {numels!r:.60}")
    if bucket_size is not None and bucket_size < 1:
        raise ValueError(
            f"bucket_size must be at least 1 element, or None for one bucket; got {bucket_size}"
        )
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    divisor = math.lcm(world_size, BUCKET_ALIGNMENT)
    params: list[ParamRange] = []
    buckets: list[BucketRange] = []
    start = end = 0
    remaining = len(numels)
    for name, numel in reversed(list(numels.items())):
        if numel < 1:
            raise ValueError(f"parameter {name!r} has {numel} elements; only non-empty ones fit")
        first = _round_up(end, PARAM_ALIGNMENT)
        end = first + numel
        params.append(ParamRange(name=name, start=first, end=end, bucket=len(buckets)))
        remaining -= 1
        full = bucket_size is not None and end - start >= bucket_size
        if full or not remaining:
            padded = _round_up(end, divisor)
            buckets.append(BucketRange(start=start, end=padded, unpadded=end - start))
            start = end = padded
    return BufferLayout(params=tuple(params), buckets=tuple(buckets))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
