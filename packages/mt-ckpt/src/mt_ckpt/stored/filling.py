"""Filling of tensors from the stored objects of a step directory."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from mt_ckpt.array import ArraySpec, chunk_file
from mt_ckpt.digest import CRC_BYTES
from mt_ckpt.disk import in_threads
from mt_ckpt.dtype import dtype_name, from_stored
from mt_ckpt.grid import Box, chunk_indices, chunk_number, overlap
from mt_ckpt.manifest import Manifest
from mt_ckpt.shard import TensorShard
from mt_ckpt.stored.content import check_pack, read_chunk, read_slices

THREADS = 4
_BATCH = 1024


class Filler:
    """Fills boxes from the stored objects that they overlap.

    A chunk that lies within a box of plain memory is read into its place; other chunks take a
    buffer of up to 64 MiB in each of the threads. The last pack stays in memory, for callers that
    read one array after the other.

    Args:
        path: The step directory.
        manifest: Its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path, self._manifest = path, manifest
        self._last: tuple[str, bytes] | None = None
        self._lock = threading.Lock()

    def fill(self, shards: Iterable[TensorShard]) -> None:
        """Fill the tensors of boxes, in place.

        Raises:
            DamageError: A file differs from its record in the manifest; tensors may be partly
                filled.
        """
        jobs = self._jobs(shards)
        # Many are made before the first runs: values that pass through the caches take our code
        # with them, and making a job in between takes three times as long.
        while batch := list(itertools.islice(jobs, _BATCH)):
            for _ in in_threads(lambda job: job(), batch, threads=min(THREADS, len(batch))):
                pass

    def _jobs(self, shards: Iterable[TensorShard]) -> Iterator[Callable[[], None]]:
        """Yield functions that fill a box from a chunk, or all boxes of one pack."""
        packed: dict[str, list[TensorShard]] = {}
        for shard in shards:
            spec = self._manifest.arrays[shard.name]
            if spec.pack is not None:
                packed.setdefault(spec.pack, []).append(shard)
                continue
            for index in chunk_indices(_box(shard), spec.chunks):
                if spec.slices is not None:
                    yield functools.partial(self._fill_slices, shard, index, spec)
                    continue
                in_box, _ = overlap(_box(shard), index, spec.chunks)
                plain = _plain(shard.tensor.detach()[in_box], spec)
                name = chunk_file(shard.name, index)
                if plain is not None:
                    yield functools.partial(read_chunk, self._path, self._manifest, name, plain)
                else:
                    yield functools.partial(self._fill_chunk, shard, index, spec)
        for pack, boxes in packed.items():
            yield functools.partial(self._fill_packed, pack, boxes)

    def _fill_packed(self, pack: str, shards: list[TensorShard]) -> None:
        content = np.frombuffer(self._pack(pack), np.uint8)
        for shard in shards:
            spec = self._manifest.arrays[shard.name]
            end = spec.offset + spec.chunk_bytes - CRC_BYTES
            _copy(content[spec.offset : end], shard, (0,) * len(spec.shape), spec.shape, spec)

    def _fill_chunk(self, shard: TensorShard, index: tuple[int, ...], spec: ArraySpec) -> None:
        values = np.empty(math.prod(spec.chunks) * spec.stored.itemsize, np.uint8)
        read_chunk(self._path, self._manifest, chunk_file(shard.name, index), values)
        _copy(values, shard, index, spec.chunks, spec)

    def _fill_slices(self, shard: TensorShard, index: tuple[int, ...], spec: ArraySpec) -> None:
        """Read the slices of a chunk that a box overlaps, or the whole chunk if it needs all."""
        slices = spec.slices or ()
        _, in_chunk = overlap(_box(shard), index, spec.chunks)
        sides = [side for side in in_chunk if isinstance(side, slice)]
        part = Box(
            offsets=tuple(side.start for side in sides),
            shape=tuple(side.stop - side.start for side in sides),
        )
        wanted = {
            chunk_number(place, spec.chunks, slices): tuple(
                i * count + at for i, count, at in zip(index, spec.slice_counts, place, strict=True)
            )
            for place in chunk_indices(part, slices)
        }

        def take(number: int, values: np.ndarray) -> None:
            if number in wanted:
                _copy(values, shard, wanted[number], slices, spec)

        name = chunk_file(shard.name, index)
        some = sorted(wanted) if len(wanted) < spec.num_slices else None
        read_slices(self._path, self._manifest, name, spec, take, some)

    def _pack(self, name: str) -> bytes:
        with self._lock:
            last = self._last
        if last is not None and last[0] == name:
            return last[1]
        content = check_pack(self._path, self._manifest, name)
        with self._lock:
            self._last = (name, content)
        return content


def _box(shard: TensorShard) -> Box:
    return Box(offsets=shard.offsets, shape=tuple(shard.tensor.shape))


def _copy(
    values: np.ndarray,
    shard: TensorShard,
    index: tuple[int, ...],
    shape: tuple[int, ...],
    spec: ArraySpec,
) -> None:
    """Copy the values of a chunk, or of a slice, into the part of a box that it overlaps.

    Args:
        values: The values.
        shard: The box.
        index: Index of the chunk or slice in the array.
        shape: Shape of the chunk or slice.
        spec: The array.
    """
    in_box, in_chunk = overlap(_box(shard), index, shape)
    chunk = values.view(spec.stored).reshape(shape)
    shard.tensor.detach()[in_box].copy_(from_stored(chunk[in_chunk], spec.dtype))


def _plain(part: torch.Tensor, spec: ArraySpec) -> np.ndarray | None:
    """Return the bytes of a part of a tensor, if a chunk has the same bytes; None otherwise."""
    fits = tuple(part.shape) == spec.chunks and dtype_name(part.dtype) == spec.dtype
    is_ours = part.device.type == "cpu" and part.is_contiguous() and not part.is_neg()
    is_same = not (spec.wide and spec.dtype == "bfloat16") and sys.byteorder == "little"
    return part.reshape(-1).view(torch.uint8).numpy() if fits and is_ours and is_same else None
