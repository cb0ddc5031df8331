"""The bytes of a chunk, in blocks: little-endian values, then their crc32c."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mt_ckpt.array import chunk_file
from mt_ckpt.digest import CRC_BYTES, Sums
from mt_ckpt.dtype import dtype_name, stored_dtype, to_stored
from mt_ckpt.grid import Box, overlap
from mt_ckpt.shard import TensorShard

BLOCK_BYTES = 2**20


class ChunkWriter:
    """One chunk of a box, read in blocks.

    Each block is copied before it is summed and written, so that checksum, digest and file agree
    even if somebody changes the tensor meanwhile. A block fits into a core's cache, which saves the
    passes over memory that whole chunks would take.

    Args:
        shard: The box.
        index: Index of the chunk in the array's grid.
        chunk_shape: Shape of a chunk.

    Attributes:
        path: Path of the chunk's file.
        size: Its size in bytes.
        sums: Checksum and digest, which are complete after the last block.
    """

    def __init__(
        self, shard: TensorShard, index: tuple[int, ...], chunk_shape: tuple[int, ...]
    ) -> None:
        self.path = chunk_file(shard.name, index)
        dtype = stored_dtype(dtype_name(shard.tensor.dtype))
        self.size = math.prod(chunk_shape) * dtype.itemsize + CRC_BYTES
        box = Box(offsets=shard.offsets, shape=tuple(shard.tensor.shape))
        in_box, in_chunk = overlap(box, index, chunk_shape)
        part = to_stored(shard.tensor[in_box])
        if part.shape != chunk_shape:  # the end of the array: Zarr stores whole chunks
            whole = np.zeros(chunk_shape, dtype)
            whole[in_chunk] = part
            part = whole
        self._values = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        self.sums = Sums()

    def blocks(self) -> Iterator[memoryview]:
        """Yield the content; each block overwrites the one before."""
        size = self._values.size
        memory = np.empty(min(size, BLOCK_BYTES) + CRC_BYTES, np.uint8)
        for start in range(0, size, BLOCK_BYTES):
            values = memory[: min(size - start, BLOCK_BYTES)]
            values[...] = self._values[start : start + len(values)]
            self.sums.add(values)
            end = len(values)
            if start + end == size:
                memory[end : end + CRC_BYTES] = self.sums.crc
                self.sums.add_crc(memory[end : end + CRC_BYTES])
                end += CRC_BYTES
            yield memory[:end].data
