"""The bytes of a chunk: little-endian values, then their crc32c."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import numpy as np

from mt_ckpt.array import CRC_BYTES, chunk_file
from mt_ckpt.dtype import dtype_name, stored_dtype, to_stored
from mt_ckpt.grid import Box, chunk_indices, overlap
from mt_ckpt.shard import TensorShard


class ChunkBuffer:
    """Memory of one chunk, which the chunks of a rank take in turn.

    A chunk is copied here before it is hashed and written, so that checksum, hash and file agree
    even if somebody changes the tensor meanwhile.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def chunks(
        self, shard: TensorShard, chunk_shape: tuple[int, ...]
    ) -> Iterator[tuple[str, memoryview]]:
        """Yield the path and content of each chunk of a box; the next one overwrites it."""
        dtype = stored_dtype(dtype_name(shard.tensor.dtype))
        size = math.prod(chunk_shape) * dtype.itemsize
        if self._memory.size < size + CRC_BYTES:
            self._memory = np.empty(size + CRC_BYTES, np.uint8)
        content = self._memory[: size + CRC_BYTES]
        data = content[:size]
        values = data.view(dtype).reshape(chunk_shape)
        box = Box(offsets=shard.offsets, shape=tuple(shard.tensor.shape))
        for index in chunk_indices(box, chunk_shape):
            in_box, in_chunk = overlap(box, index, chunk_shape)
            part = to_stored(shard.tensor[in_box])
            if part.shape != chunk_shape:  # the end of the array: Zarr stores whole chunks
                values[...] = 0
            values[in_chunk] = part
            content[size:] = crc32c(data)
            yield chunk_file(shard.name, index), content.data


def crc32c(data: np.ndarray) -> np.ndarray:
    """Return the crc32c of bytes as Zarr stores it.

    Shape:
        data: (any number of bytes,) uint8, contiguous.
        result: (4,) uint8, little-endian.
    """
    import google_crc32c

    value = google_crc32c.value(cast("bytes", data))
    return np.frombuffer(value.to_bytes(CRC_BYTES, "little"), np.uint8)
