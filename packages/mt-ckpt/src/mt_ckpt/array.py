"""Description of one array of a checkpoint, the names of its files, and the places in them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mt_ckpt.digest import CRC_BYTES
from mt_ckpt.dtype import dtype_names, stored_dtype
from mt_ckpt.grid import MAX_CHUNK_BYTES, MAX_SLICES

_INDEX_ENTRY = 16  # offset and size of a slice

PACKS = "__packs"  # no array can have this name
_PACK = re.compile(PACKS + r"/\d{5,18}\.zip")


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """Shape, dtype and chunk grid of one array.

    Attributes:
        shape: Global shape.
        dtype: Name of the tensor's dtype; `stored_dtype` has the one on disk.
        chunks: Shape of a chunk; the last one of a dim may reach over the end, as in Zarr.
        slices: Shape of a slice, if chunks have slices that can be read alone.
        wide: Whether a bfloat16 is stored as a float32, as in format version 1.
        pack: Path of the pack that holds the array's one chunk; None if its chunks are files.
        offset: Offset of the chunk in the pack, in bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]
    slices: tuple[int, ...] | None = None
    wide: bool = False
    pack: str | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in dtype_names():
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(dtype_names())}")
        for size in (*self.shape, *self.chunks):  # loops, for there may be many arrays
            if type(size) is not int or not 0 <= size < 2**63:
                raise ValueError(f"shape {self.shape} or chunks {self.chunks} are not sizes")
        if len(self.shape) != len(self.chunks) or 0 in self.chunks:
            raise ValueError(f"chunks {self.chunks} do not fit the shape {self.shape}")
        if self.slices is not None:
            self._check_slices(self.slices)
        for chunk, size, part in zip(
            self.chunks, self.shape, self.slices or (1,) * len(self.shape), strict=True
        ):
            if chunk >= max(1, size) + part:
                raise ValueError(f"chunks {self.chunks} are larger than the shape {self.shape}")
        if (size := math.prod(self.chunks) * self.stored.itemsize) > MAX_CHUNK_BYTES:
            raise ValueError(f"chunks {self.chunks} have {size} bytes, more than {MAX_CHUNK_BYTES}")
        if self.pack is not None and not (_PACK.fullmatch(self.pack) and self.shape == self.chunks):
            raise ValueError(f"{self.pack!r} is no pack, or the array is not one chunk")

    def _check_slices(self, part: tuple[int, ...]) -> None:
        if len(part) != len(self.chunks) or not all(type(n) is int and n > 0 for n in part):
            raise ValueError(f"slices {part} do not fit the chunks {self.chunks}")
        if any(n % p for n, p in zip(self.chunks, part, strict=True)):
            raise ValueError(f"slices {part} do not divide the chunks {self.chunks}")
        if not 1 < self.num_slices <= MAX_SLICES or self.pack is not None:
            raise ValueError(f"a chunk {self.chunks} can't have slices {part}")

    @property
    def stored(self) -> np.dtype:
        """Numpy dtype on disk."""
        return stored_dtype(self.dtype, wide=self.wide)

    @property
    def size(self) -> int:
        """Size of the values in bytes, as they are stored."""
        return math.prod(self.shape) * self.stored.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk in bytes, with its checksums and the index of its slices."""
        if self.slices is not None:
            return self.num_slices * (self.slice_bytes + _INDEX_ENTRY) + CRC_BYTES
        return math.prod(self.chunks) * self.stored.itemsize + CRC_BYTES

    @property
    def slice_bytes(self) -> int:
        """Size of a slice with its checksum in bytes."""
        return math.prod(self.slices or ()) * self.stored.itemsize + CRC_BYTES

    @property
    def slice_counts(self) -> tuple[int, ...]:
        """Number of slices of a chunk in each dim; 1 without slices."""
        return tuple(n // p for n, p in zip(self.chunks, self.slices or self.chunks, strict=True))

    @property
    def num_slices(self) -> int:
        """Number of slices of a chunk."""
        return math.prod(self.slice_counts)

    @property
    def num_sums(self) -> int:
        """Number of checksums that the manifest has for each chunk: one for each slice."""
        return 0 if self.slices is None else self.num_slices

    def slice_index(self) -> bytes:
        """Return the index at the end of a chunk: offset and size of each slice, little-endian."""
        places = np.empty((self.num_slices, 2), "<u8")
        places[:, 0] = np.arange(self.num_slices) * self.slice_bytes
        places[:, 1] = self.slice_bytes
        return places.tobytes()

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return math.prod(-(-n // step) for n, step in zip(self.shape, self.chunks, strict=True))

    def chunk_files(self, name: str) -> Iterator[str]:
        """Yield the paths of this array's chunk files, for an array called `name`."""
        counts = (-(-n // step) for n, step in zip(self.shape, self.chunks, strict=True))
        for index in itertools.product(*map(range, counts)):
            yield chunk_file(name, index)


def chunk_file(name: str, index: tuple[int, ...]) -> str:
    """Return Zarr's default chunk key with "." between the indices: one folder per array."""
    return f"{name}/" + ".".join(["c", *map(str, index)])


def group_names(names: Iterator[str] | list[str]) -> list[str]:
    """Return the groups that contain the arrays, outermost first, without the root."""
    groups = {
        "/".join(parts[:end])
        for n in names
        for parts in [n.split("/")]
        for end in range(1, len(parts))
    }
    return sorted(groups)
