"""Boxes of an array, and a regular chunk grid that divides every box into whole chunks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mt_ckpt.error import CheckpointError

MAX_CHUNK_BYTES = 64 * 2**20
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
) -> tuple[int, ...]:
    """Return the chunk shape for an array that ranks write as `boxes`.

    In each dim the chunk size divides every cut between boxes, so a chunk never has two writers.
    Chunks above `MAX_CHUNK_BYTES` are then split further.

    Raises:
        CheckpointError: The boxes leave a hole, overlap, or have no usable common chunk grid.
    """
    boxes = [box for box in boxes if math.prod(box.shape)]
    if len(boxes) == 1 and boxes[0].shape == shape:
        return _split(shape, list(shape), itemsize)
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
    return _split(shape, steps, itemsize)


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
