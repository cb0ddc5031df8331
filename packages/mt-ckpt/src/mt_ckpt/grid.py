"""Boxes of an array, and a regular grid that divides every box into whole chunks.

A chunk is a stored object. The chunks of large arrays are divided further into slices, and a reader
can read one slice alone; the shape of a slice follows from the array, and not from the ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mt_ckpt.error import CheckpointError

MAX_CHUNK_BYTES = 64 * 2**20
SLICED_BYTES = 16 * 2**20  # least size of an array whose chunks have slices
SLICE_BYTES = 2**20
MIN_SLICE_BYTES = 2**16
MAX_SLICES = 2**14  # slices of a chunk
_EVEN_PARTS = 4
_PRIMES = (2, 3, 5, 7, 11, 13)
_LONG = 64  # elements: the last slice along a dim as long as this may be partial
_MAX_CHUNKS = 2**20


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of an array, and the rank that holds it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int = 0

    def __str__(self) -> str:
        ends = zip(self.offsets, self.shape, strict=True)
        return "[" + ", ".join(f"{start}:{start + size}" for start, size in ends) + "]"

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index of each dim."""
        return tuple(o + s for o, s in zip(self.offsets, self.shape, strict=True))


def plan_chunks(
    name: str, shape: tuple[int, ...], itemsize: int, boxes: Sequence[Box]
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the shapes of a chunk and of a slice for an array that ranks write as `boxes`.

    In each dim the chunk size divides every cut between boxes, so a chunk never has two writers.
    Chunks above `MAX_CHUNK_BYTES` are then split further. The slices are None if chunks have none.

    Raises:
        CheckpointError: The boxes leave a hole, overlap, or have no usable common chunk grid.
    """
    boxes = [box for box in boxes if math.prod(box.shape)]
    if len(boxes) == 1 and boxes[0].shape == shape:
        return _sliced(shape, shape, itemsize)
    cuts = [
        sorted({edge for box in boxes for edge in (box.offsets[dim], box.ends[dim])} | {0, size})
        for dim, size in enumerate(shape)
    ]
    # Without a cut inside, a dim of size n is one chunk of n (and at least 1, as Zarr asks).
    steps = [
        math.gcd(*edges[1:-1]) or max(1, size) for edges, size in zip(cuts, shape, strict=True)
    ]
    count = math.prod(-(-size // step) for size, step in zip(shape, steps, strict=True))
    if count > _MAX_CHUNKS:
        raise CheckpointError(
            f"tensor {name!r} of shape {shape}: the boxes are cut so unevenly that only chunks of "
            f"shape {tuple(steps)} fit them all, {count} files. Cut it evenly: at multiples of one "
            "size per dim",
            tensor=name,
        )
    # Checked on the grid of all cuts, whose cells are few, and not element by element.
    _check_cover(name, shape, cuts, boxes)
    return _sliced(shape, tuple(steps), itemsize)


def plan_slice(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Return the shape of a slice of an array; None for an array without slices.

    Every dim that can be cut evenly is cut in four, so that a half or a quarter of any dim is whole
    slices. The longest dims are then cut further, down to `SLICE_BYTES`.
    """
    if math.prod(shape) * itemsize < SLICED_BYTES:
        return None
    part = list(shape)

    def is_above(limit: int) -> bool:
        return math.prod(part) * itemsize > limit

    for _ in range(_EVEN_PARTS.bit_length() - 1):
        for dim in sorted(range(len(part)), key=lambda d: -part[d]):
            if part[dim] % 2 == 0 and is_above(MIN_SLICE_BYTES):
                part[dim] //= 2
    while is_above(SLICE_BYTES):
        longest = max(part)
        into = next((n for n in _PRIMES if longest % n == 0), 2 if longest >= _LONG else 0)
        if not into:
            break
        part[part.index(longest)] = -(-longest // into)
    return tuple(part) if not is_above(MAX_CHUNK_BYTES) else None


def _sliced(
    shape: tuple[int, ...], steps: tuple[int, ...], itemsize: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the shapes of a chunk within `steps` and of its slices."""
    wanted = plan_slice(shape, itemsize)
    part = None if wanted is None else _fitted(wanted, shape, steps)
    if part is None:
        return _split(shape, list(steps), itemsize), None
    in_parts = tuple(-(-n // p) for n, p in zip(shape, part, strict=True))
    steps_in_parts = [-(-n // p) for n, p in zip(steps, part, strict=True)]
    counts = _split(in_parts, steps_in_parts, math.prod(part) * itemsize)
    if not 1 < math.prod(counts) <= MAX_SLICES:
        return _split(shape, list(steps), itemsize), None
    return tuple(n * p for n, p in zip(counts, part, strict=True)), part


def _fitted(
    part: tuple[int, ...], shape: tuple[int, ...], steps: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return a slice of about the shape `part` that divides `steps`; None if there is none."""
    fitted = []
    for wanted, size, step in zip(part, shape, steps, strict=True):
        if step >= size or step % wanted == 0:
            fitted.append(wanted)
            continue
        near = math.gcd(step, wanted)
        if near * 4 < wanted:
            least = -(-step // wanted)
            near = next((step // n for n in range(least, 4 * least) if step % n == 0), 0)
        if not near:
            return None
        fitted.append(near)
    return tuple(fitted)


def _check_cover(
    name: str, shape: tuple[int, ...], cuts: list[list[int]], boxes: Sequence[Box]
) -> None:
    """Raise CheckpointError unless every element is in exactly one box."""
    if math.prod(shape) == 0:
        return
    at = [{edge: index for index, edge in enumerate(edges)} for edges in cuts]
    cover = np.zeros([len(edges) - 1 for edges in cuts], dtype=np.int32)
    for box in boxes:
        cover[
            tuple(
                slice(where[start], where[end])
                for where, start, end in zip(at, box.offsets, box.ends, strict=True)
            )
        ] += 1
    if (cover == 1).all():
        return
    cell = tuple(np.argwhere(cover != 1)[0])
    start = tuple(edges[index] for edges, index in zip(cuts, cell, strict=True))
    end = tuple(edges[index + 1] for edges, index in zip(cuts, cell, strict=True))
    part = Box(offsets=start, shape=tuple(e - s for s, e in zip(start, end, strict=True)))
    if cover[cell] == 0:
        raise CheckpointError(
            f"tensor {name!r} of shape {shape}: no rank writes the part {part}. Every element "
            "needs one shard with write=True; if the shards are on several ranks, pass their group",
            tensor=name,
        )
    writers = [
        box.rank
        for box in boxes
        if all(o <= s < e for o, s, e in zip(box.offsets, start, box.ends, strict=True))
    ]
    raise CheckpointError(
        f"tensor {name!r} of shape {shape}: the part {part} has {len(writers)} writers, ranks "
        f"{writers}. Data that several ranks hold is written by one: give the others write=False",
        tensor=name,
    )


def _split(shape: tuple[int, ...], steps: list[int], itemsize: int) -> tuple[int, ...]:
    """Split a chunk down to MAX_CHUNK_BYTES, in the dim that keeps it largest."""
    steps = list(steps)
    while (nbytes := math.prod(steps) * itemsize) > MAX_CHUNK_BYTES:
        target = [step * MAX_CHUNK_BYTES // nbytes for step in steps]
        splits = [
            _largest_part(step, max(1, limit), is_whole=step >= size)
            for step, limit, size in zip(steps, target, shape, strict=True)
        ]
        fitting = [dim for dim in range(len(steps)) if 0 < splits[dim] <= target[dim]]
        # If no single dim is enough, cut the longest as far as possible and try again.
        dim = (
            max(fitting, key=lambda d: splits[d] / steps[d])
            if fitting
            else max(range(len(steps)), key=lambda d: steps[d] // splits[d])
        )
        steps[dim] = splits[dim]
    return tuple(steps)


def _largest_part(step: int, limit: int, *, is_whole: bool) -> int:
    """Return the largest chunk length up to `limit` that does not cross the end of `step`."""
    if is_whole:  # the chunk may cross the end of the array
        return -(-step // -(-step // limit))
    return next(step // k for k in range(-(-step // limit), step + 1) if step % k == 0)


def chunk_indices(box: Box, chunks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Return the indices of all chunks that share an element with `box`."""
    if 0 in box.shape:
        return iter(())
    return itertools.product(
        *(
            range(start // size, -(-end // size))
            for start, end, size in zip(box.offsets, box.ends, chunks, strict=True)
        )
    )


def chunk_number(index: tuple[int, ...], shape: tuple[int, ...], chunks: tuple[int, ...]) -> int:
    """Return the number of a chunk, with the last dim counted fastest."""
    number = 0
    for i, size, step in zip(index, shape, chunks, strict=True):
        number = number * -(-size // step) + i
    return number


def overlap(
    box: Box, index: tuple[int, ...], chunks: tuple[int, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the overlap of chunk `index` with `box`, as an index into each of them."""
    in_box, in_chunk = [], []
    for start, end, i, size in zip(box.offsets, box.ends, index, chunks, strict=True):
        low, high = max(start, i * size), min(end, (i + 1) * size)
        in_box.append(slice(low - start, high - start))
        in_chunk.append(slice(low - i * size, high - i * size))
    return (*in_box, ...), (*in_chunk, ...)  # the ellipsis keeps a 0-d array an array
