"""Tensors of other formats, which are described first and read on demand."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mt_files import open_file, shorten
from torch import Tensor

from mt_ckpt.dtype import dtype_name, dtype_names
from mt_ckpt.error import CheckpointError
from mt_ckpt.exchange.arrays import Report
from mt_ckpt.exchange.pages import Pages
from mt_ckpt.manifest import check_nesting
from mt_ckpt.shard import TensorShard, check_name

MAX_PIECES = 1 << 12
MAX_DIMS = 32
# A private copy, for which the system reserves nothing: a file may be larger than the memory.
_FLAGS = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)  # MAP_NORESERVE
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_UNSAFE = re.compile(r"[^A-Za-z0-9_.@+=,/-]")


class MappedFiles:
    """Files as memory, one mapping for each, whose pages are read on first use.

    Args:
        folder: The folder that the files, and links among them, are in.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._maps: dict[str, mmap.mmap] = {}

    def view(self, name: str, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return elements of a file as a flat tensor; writing to it changes no file.

        Raises:
            CheckpointError: The file is shorter.
            FileError: The file can't be read.
        """
        if not count:
            return torch.empty(0, dtype=dtype)
        size = count * dtype.itemsize
        pages = self._pages(name, start, size)
        if start % dtype.itemsize:  # an unaligned tensor is no tensor
            raw = torch.frombuffer(pages, dtype=torch.uint8, offset=start, count=size)
            return raw.clone().view(dtype)
        return torch.frombuffer(pages, dtype=dtype, offset=start, count=count)

    def part(self, name: str, start: int, size: int) -> bytes:
        """Return a copy of bytes of a file.

        Raises:
            CheckpointError: The file is shorter.
            FileError: The file can't be read.
        """
        return self._pages(name, start, size)[start : start + size]

    def check(self, name: str, start: int, size: int, crc: int) -> None:
        """Raise CheckpointError unless bytes of a file have this crc32."""
        with memoryview(self._pages(name, start, size) if size else b"") as pages:
            found = zlib.crc32(pages[start : start + size])
        if found != crc:
            path = self.folder / name
            raise CheckpointError(
                f"{path}: {size} bytes at {start} have another crc32 than was written; the file is "
                "damaged, restore it from a copy",
                file=str(path),
            )

    def _pages(self, name: str, start: int, size: int) -> mmap.mmap:
        if name not in self._maps:
            with open_file(self.folder / name, within=self.folder) as file:
                if not os.fstat(file.fileno()).st_size:
                    raise self._short(name)
                try:
                    self._maps[name] = mmap.mmap(file.fileno(), 0, flags=_FLAGS, prot=_PROTECTION)
                except OSError as error:
                    path = self.folder / name
                    raise CheckpointError(
                        f"{path}: can't be mapped into memory ({error.strerror}); raise the limit "
                        "of this process's address space (ulimit -v)",
                        file=str(path),
                    ) from error
        pages = self._maps[name]
        if start < 0 or start + size > len(pages):
            raise self._short(name)
        return pages

    def _short(self, name: str) -> CheckpointError:
        path = self.folder / name
        return CheckpointError(
            f"{path}: is shorter than its tensors; it was not copied whole: restore it",
            file=str(path),
        )


@dataclass(frozen=True, kw_only=True)
class StoredBox:
    """A box of a tensor in a file.

    Attributes:
        offsets: Index of its first element in the tensor.
        shape: Shape of the box.
        file: Name of the file.
        start: Offset of its elements in the file, in bytes.
        strides: Distance of neighbours in each dim, in elements; None for row-major order.
        checksum: Start and size of the bytes with the elements, and their crc32; None without a
            checksum.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    strides: tuple[int, ...] | None = None
    checksum: tuple[int, int, int] | None = None

    def read(self, files: MappedFiles, dtype: torch.dtype) -> Tensor:
        """Return the box, after a check of its checksum."""
        if self.checksum is not None:
            files.check(self.file, *self.checksum)
        if self.strides is None or not math.prod(self.shape):
            flat = files.view(self.file, self.start, math.prod(self.shape), dtype)
            return flat.view(self.shape)
        last = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        flat = files.view(self.file, self.start, last + 1, dtype)
        return flat.as_strided(self.shape, self.strides)


@dataclass(frozen=True, kw_only=True)
class ForeignTensor:
    """A tensor of another format.

    Attributes:
        dtype: Dtype of its elements.
        shape: Shape of the whole tensor.
        pieces: The boxes of the tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Sequence[StoredBox]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def in_place(self) -> bool:
        """Whether the tensor can be used directly as pages of a file."""
        return len(self.pieces) == 1 and self.pieces[0].start % self.dtype.itemsize == 0

    def check(self, name: str) -> None:
        """Raise CheckpointError unless the pieces are the whole tensor, each element once."""
        reason = ""
        starts = np.array([piece.offsets for piece in self.pieces], dtype=np.int64)
        ends = starts + np.array([piece.shape for piece in self.pieces], dtype=np.int64)
        if not self.pieces or len(self.pieces) > MAX_PIECES:
            reason = f"{len(self.pieces)} pieces"
        elif starts.shape != (len(self.pieces), len(self.shape)) or (ends > self.shape).any():
            reason = "a piece outside of it"
        elif sum(math.prod(p.shape) for p in self.pieces) != math.prod(self.shape):
            reason = "pieces of another size than the whole"
        elif _overlap(starts, ends):
            reason = "pieces that overlap"
        if reason:
            raise CheckpointError(
                f"tensor {shorten(name)} of shape {shorten(self.shape)} has {reason}; the "
                "checkpoint is damaged: restore it from a copy",
                tensor=name,
            )

    def read(self, files: MappedFiles, *, into: Tensor | None = None) -> Tensor:
        """Return the whole tensor, as pages of its file if it is in one piece.

        Args:
            files: The files of the checkpoint.
            into: Tensor to fill and return, if there are several pieces or a copy is needed.
        """
        if self.in_place:
            return self.pieces[0].read(files, self.dtype)
        whole = torch.empty(self.shape, dtype=self.dtype) if into is None else into
        for piece in self.pieces:
            ends = (o + n for o, n in zip(piece.offsets, piece.shape, strict=True))
            box = tuple(map(slice, piece.offsets, ends))
            whole[box].copy_(piece.read(files, self.dtype))
        return whole


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    """A checkpoint of another format, with tensors that are read on demand.

    Attributes:
        files: Its files.
        tensors: Its tensors by name.
        skipped: Names of entries other than tensors.
        step: Its training step, if known.
        description: Other facts about the checkpoint, as plain values.
    """

    files: MappedFiles
    tensors: Mapping[str, ForeignTensor]
    skipped: Sequence[str] = ()
    step: int | None = None
    description: Mapping[str, Any] = field(default_factory=dict)

    def read(self, name: str) -> Tensor:
        """Return a whole tensor.

        Raises:
            CheckpointError: A file is damaged.
        """
        return self.tensors[name].read(self.files)

    @contextlib.contextmanager
    def reading(self, folder: Path) -> Iterator[Callable[[str], Tensor]]:
        """Yield a function that returns a whole tensor by its name, for the block.

        Tensors are pages of files: of the checkpoint's files, or for a tensor in several pieces of
        temporary files below `folder`.
        """
        with Pages.within(folder) as pages:

            def read(name: str) -> Tensor:
                tensor = self.tensors[name]
                into = None if tensor.in_place else pages.empty(tensor.shape, tensor.dtype)
                return tensor.read(self.files, into=into)

            yield read

    def shards(self, pages: Pages, prefix: str, report: Report) -> Iterator[TensorShard]:
        """Yield all tensors as arrays of a checkpoint.

        Args:
            pages: Place for tensors that consist of several pieces.
            prefix: Group in which the arrays are put; empty for none.
            report: Called before each tensor.

        Raises:
            CheckpointError: A tensor has no possible name or dtype, or a file is damaged.
        """
        names = self._names(prefix)
        total, done = sum(tensor.size for tensor in self.tensors.values()), 0
        for name, tensor in self.tensors.items():
            report(done, total)
            done += tensor.size
            if dtype_name(tensor.dtype) not in dtype_names():
                raise CheckpointError(
                    f"tensor {shorten(name)} is {dtype_name(tensor.dtype)}, which a checkpoint "
                    f"can't store; convert it first to one of {', '.join(dtype_names())}",
                    tensor=name,
                )
            into = None if tensor.in_place else pages.empty(tensor.shape, tensor.dtype)
            yield TensorShard(names[name], tensor.read(self.files, into=into))

    def _names(self, prefix: str) -> dict[str, str]:
        start = f"{prefix.strip('/')}/" if prefix else ""
        names = {name: start + _UNSAFE.sub("_", name) for name in self.tensors}
        if len(set(names.values())) < len(names):
            twice = next(n for n in names.values() if list(names.values()).count(n) > 1)
            both = [name for name, made in names.items() if made == twice]
            raise CheckpointError(
                f"tensors {shorten(both[0])} and {shorten(both[1])} would both be the array "
                f"{twice[:200]}; rename one"
            )
        try:
            for name in names.values():
                check_name(name)
            check_nesting(list(names.values()))
        except ValueError as error:
            raise CheckpointError(f"{self.files.folder}: {error}") from error
        return names


def _overlap(starts: np.ndarray, ends: np.ndarray) -> bool:
    """Return whether two boxes share an element."""
    for index in range(len(starts) - 1):
        low = np.maximum(starts[index], starts[index + 1 :])
        high = np.minimum(ends[index], ends[index + 1 :])
        if (low < high).all(axis=1).any():
            return True
    return False
