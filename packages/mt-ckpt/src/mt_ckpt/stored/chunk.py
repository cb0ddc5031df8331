"""The bytes of a chunk, in blocks: little-endian values and their crc32c, or slices of such."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from mt_ckpt.array import ArraySpec, chunk_file
from mt_ckpt.digest import CRC_BYTES, Sums, crc32c
from mt_ckpt.dtype import to_stored
from mt_ckpt.grid import Box, overlap
from mt_ckpt.shard import TensorShard

BLOCK_BYTES = 2**20
_kept = threading.local()


def _block(size: int) -> np.ndarray:
    """Return memory of this thread, which its next chunk uses again.

    New memory for each chunk makes the allocator keep twice as much.
    """
    found: np.ndarray | None = getattr(_kept, "block", None)
    if found is None or found.size < size:
        found = _kept.block = np.empty(max(size, BLOCK_BYTES + CRC_BYTES), np.uint8)
    return found[:size]


class ChunkWriter:
    """One chunk of a box, read in blocks.

    Each block is copied before it is summed and written, so that checksum, digest and file agree
    even if somebody changes the tensor meanwhile. A block fits into a core's cache, which saves the
    passes over memory that whole chunks would take.

    Args:
        shard: The box.
        index: Index of the chunk in the array's grid.
        spec: The array.

    Attributes:
        path: Path of the chunk's file.
        size: Its size in bytes.
        sums: Checksum and digest, which are complete after the last block.
        slice_sums: The crc32c of each slice in hex, complete after the last block.
    """

    def __init__(self, shard: TensorShard, index: tuple[int, ...], spec: ArraySpec) -> None:
        self.path = chunk_file(shard.name, index)
        self.size, self.sums, self.slice_sums = spec.chunk_bytes, Sums(), ""
        box = Box(offsets=shard.offsets, shape=tuple(shard.tensor.shape))
        in_box, self._within = overlap(box, index, spec.chunks)
        self._spec, self._values = spec, to_stored(shard.tensor[in_box])

    def blocks(self) -> Iterator[memoryview]:
        """Yield the content; each block overwrites the one before."""
        return self._plain_blocks() if self._spec.slices is None else self._slices()

    def _plain_blocks(self) -> Iterator[memoryview]:
        part, shape = self._values, self._spec.chunks
        if part.shape != shape:  # the end of the array: Zarr stores whole chunks
            whole = np.zeros(shape, part.dtype)
            whole[self._within] = part
            part = whole
        given = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        memory = _block(min(given.size, BLOCK_BYTES) + CRC_BYTES)
        for start in range(0, given.size, BLOCK_BYTES):
            values = memory[: min(given.size - start, BLOCK_BYTES)]
            values[...] = given[start : start + len(values)]
            self.sums.add(values)
            end = len(values)
            if start + end == given.size:
                memory[end : end + CRC_BYTES] = self.sums.crc
                self.sums.add_stored(memory[end : end + CRC_BYTES])
                end += CRC_BYTES
            yield memory[:end].data

    def _slices(self) -> Iterator[memoryview]:
        spec, slices = self._spec, self._spec.slices or ()
        memory = _block(spec.slice_bytes)
        data = memory[:-CRC_BYTES]
        values = data.view(spec.stored).reshape(slices)
        given = Box(offsets=(0,) * len(slices), shape=self._values.shape)
        sums: list[str] = []
        for index in np.ndindex(spec.slice_counts):
            in_given, in_slice = overlap(given, index, slices)
            part = self._values[in_given]
            if part.shape != slices:  # beyond the end of the array
                values[...] = 0
            if part.size:
                values[in_slice] = part
            crc = memory[-CRC_BYTES:]
            crc[...] = crc32c(data)
            self.sums.add_stored(memory)
            sums.append(crc.tobytes().hex())
            yield memory.data
        self.slice_sums = "".join(sums)
        places = np.frombuffer(spec.slice_index(), np.uint8)
        end = np.concatenate([places, crc32c(places)])
        self.sums.add_stored(end)
        yield end.data
