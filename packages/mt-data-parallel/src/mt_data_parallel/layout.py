"""The layout of parameters in a flat buffer: pure arithmetic, no torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

# 64 elements: every view starts on its own cache line and on a vector boundary in any dtype.
PARAM_ALIGNMENT = 64
# 128 elements times the ranks: every rank could own an equal, aligned slice of a bucket.
BUCKET_ALIGNMENT = 128
BANDWIDTH = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ParamRange:
    """Elements `[start, end)` of the flat buffer hold one parameter, or its gradient.

    Attributes:
        name: The parameter's name.
        start: First element.
        end: One past the last element; `end - start` is the parameter's numel.
        bucket: Index of the bucket that holds it.
    """

    name: str
    start: int
    end: int
    bucket: int


@dataclass(frozen=True, kw_only=True)
class BucketRange:
    """Elements `[start, end)` of the flat buffer are reduced by one collective.

    Attributes:
        start: First element.
        end: One past the last element, padding included.
        unpadded: Elements from `start` to the end of the last parameter.
    """

    start: int
    end: int
    unpadded: int


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """The result of `plan_buckets` or `plan_whole`.

    Attributes:
        params: One range per parameter, in buffer order.
        buckets: One range per bucket; they follow one another without holes.
    """

    params: tuple[ParamRange, ...]
    buckets: tuple[BucketRange, ...]

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.buckets[-1].end if self.buckets else 0

    def part_of(self, name: str, shard: int, num_shards: int) -> tuple[int, int] | None:
        """Return which elements of a parameter lie in one of the equal parts of its bucket.

        Args:
            name: The parameter.
            shard: Index of the part.
            num_shards: Number of parts.

        Returns:
            Start and end within the flattened parameter; None if it has no element there.
        """
        place = next(param for param in self.params if param.name == name)
        bucket = self.buckets[place.bucket]
        size = (bucket.end - bucket.start) // num_shards
        first = max(place.start, bucket.start + shard * size)
        last = min(place.end, bucket.start + (shard + 1) * size)
        return (first - place.start, last - place.start) if first < last else None


def plan_buckets(
    numels: Mapping[str, int],
    *,
    bucket_size: int | None,
    world_size: int = 1,
    alone: Collection[str] = (),
    pad_for_bandwidth: bool = False,
) -> BufferLayout:
    """Lay parameters out in a flat buffer, last parameter first, and cut it into buckets.

    Backward produces gradients roughly from the last parameter to the first, so the first bucket of
    the buffer completes first. A parameter starts at a multiple of 64 elements,
    a bucket closes once it holds at least `bucket_size` elements, and a bucket's end is padded to
    a multiple of `lcm(world_size, 128)`. Rank `r` can keep the `r`-th of `world_size` equal parts
    of every bucket; parameters may lie across their borders.

    Args:
        numels: Elements per parameter, in model order.
        bucket_size: Elements after which a bucket closes; None puts everything in one bucket.
        world_size: Ranks that reduce the buffer.
        alone: Parameters with a bucket of their own. A parameter that two pipeline stages share has
            to be cut at the same places on both.
        pad_for_bandwidth: Pad to a multiple of 65536 elements too, which some networks prefer.

    Returns:
        The layout. It depends on the arguments only, so all ranks agree on it without talking.

    Raises:
        ValueError: A size is not positive, or `alone` names no parameter.
    """
    _check(numels, bucket_size, world_size)
    unknown = sorted(set(alone) - set(numels))
    if unknown:
        raise ValueError(f"alone names {unknown[0]!r}, which numels lacks")
    divisor = math.lcm(world_size, BUCKET_ALIGNMENT, BANDWIDTH if pad_for_bandwidth else 1)
    params: list[ParamRange] = []
    buckets: list[BucketRange] = []
    start = end = 0
    for names in _cut(numels, bucket_size, alone):
        for name in names:
            first = _round_up(end, PARAM_ALIGNMENT)
            end = first + numels[name]
            params.append(ParamRange(name=name, start=first, end=end, bucket=len(buckets)))
        padded = _round_up(end, divisor)
        buckets.append(BucketRange(start=start, end=padded, unpadded=end - start))
        start = end = padded
    return BufferLayout(params=tuple(params), buckets=tuple(buckets))


def plan_whole(
    numels: Mapping[str, int],
    *,
    costs: Mapping[str, float],
    bucket_size: int | None,
    world_size: int = 1,
    replicas: int = 1,
    alone: Collection[str] = (),
    pad_for_bandwidth: bool = False,
) -> BufferLayout:
    """Lay parameters out so that one rank keeps each of them whole, balanced by cost.

    For optimizers that need all of a matrix (Muon). Every bucket is `world_size` equal parts, and
    no parameter lies across a border. Within a bucket the costliest parameter is placed first, on
    the rank with the least cost so far (buckets before included) whose part does not grow beyond
    1.3 times the even share, or the largest parameter.

    Args:
        numels: Elements per parameter, in model order.
        costs: Cost of one step of each parameter, in any unit.
        bucket_size: Elements after which a bucket closes; None puts everything in one bucket.
        world_size: Ranks that keep different parts.
        replicas: Ranks that keep the same part, and sum it in equal portions.
        alone: Parameters that get a bucket of their own.
        pad_for_bandwidth: Pad every part to a multiple of 65536 elements.

    Returns:
        The layout, a function of the arguments only. `params` are in buffer order.

    Raises:
        ValueError: A size is not positive, or a cost is missing.
    """
    _check(numels, bucket_size, world_size)
    missing = [name for name in numels if name not in costs]
    if missing:
        raise ValueError(f"costs has no entry for {missing[0]!r}; give every parameter one")
    divisor = math.lcm(replicas, BUCKET_ALIGNMENT, BANDWIDTH if pad_for_bandwidth else 1)
    loads = [0.0] * world_size
    params: list[ParamRange] = []
    buckets: list[BucketRange] = []
    start = 0
    for names in _cut(numels, bucket_size, alone):
        owners = _share_out({name: numels[name] for name in names}, costs, loads)
        used = [sum(_round_up(numels[n], PARAM_ALIGNMENT) for n in owned) for owned in owners]
        part = _round_up(max(used), divisor)
        for rank, owned in enumerate(owners):
            first = start + rank * part
            for name in owned:
                end = first + numels[name]
                params.append(ParamRange(name=name, start=first, end=end, bucket=len(buckets)))
                first = _round_up(end, PARAM_ALIGNMENT)
        last = max(p.end for p in params if p.bucket == len(buckets))
        end = start + world_size * part
        buckets.append(BucketRange(start=start, end=end, unpadded=last - start))
        start = end
    return BufferLayout(params=tuple(params), buckets=tuple(buckets))


def _check(numels: Mapping[str, int], bucket_size: int | None, world_size: int) -> None:
    if not isinstance(numels, Mapping):
        raise TypeError(f"numels must map names to numbers of elements, got {numels!r:.60}")
    if bucket_size is not None and bucket_size < 1:
        raise ValueError(
            f"bucket_size must be at least 1 element, or None for one bucket; got {bucket_size}"
        )
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    for name, numel in numels.items():
        if numel < 1:
            raise ValueError(f"parameter {name!r} has {numel} elements; only non-empty ones fit")


def _cut(
    numels: Mapping[str, int], bucket_size: int | None, alone: Collection[str]
) -> list[list[str]]:
    """Return the parameters of every bucket, last parameter first."""
    buckets: list[list[str]] = []
    names: list[str] = []
    end = 0
    for name in reversed(list(numels)):
        if name in alone and names:
            buckets.append(names)
            names, end = [], 0
        names.append(name)
        end = _round_up(end, PARAM_ALIGNMENT) + numels[name]
        if name in alone or (bucket_size is not None and end >= bucket_size):
            buckets.append(names)
            names, end = [], 0
    return [*buckets, names] if names else buckets


def _share_out(
    numels: Mapping[str, int], costs: Mapping[str, float], loads: list[float]
) -> list[list[str]]:
    """Assign every parameter to a rank, the costliest first; `loads` grows by the costs."""
    owners: list[list[str]] = [[] for _ in loads]
    sizes = [0] * len(loads)
    largest = max(max(numels.values()), 1.3 * sum(numels.values()) / len(loads))
    for name in sorted(numels, key=lambda name: (-costs[name], name)):
        fitting = [rank for rank, size in enumerate(sizes) if size + numels[name] <= largest]
        rank = min(fitting or range(len(loads)), key=lambda r: (loads[r], sizes[r], r))
        owners[rank].append(name)
        sizes[rank] += numels[name]
        loads[rank] += costs[name]
    return owners


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
