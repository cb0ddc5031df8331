"""Writing of safetensors files, tensor by tensor, in a folder that appears when it is complete."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from mt_files import FileError, sync, write_file
from mt_model import Sizes
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.reading.files import INDEX, ONE_FILE
from mt_hf.reading.tensors import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A tensor to write.

    Attributes:
        name: Name of the tensor.
        shape: Shape of the tensor.
        dtype: Dtype of its elements.
    """

    name: str
    shape: Sizes
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def plan_files(tensors: Sequence[Planned], limit: int) -> dict[str, list[Planned]]:
    """Distribute tensors to files of at most `limit` bytes; a larger tensor gets its own file.

    In a file the widest elements come first, so that all are aligned.

    Args:
        tensors: Tensors in the order of the files.
        limit: Largest size of a file's tensors, in bytes.
    """
    parts: list[list[Planned]] = []
    room = 0
    for tensor in tensors:
        if not parts or tensor.size > room:
            parts.append([])
            room = limit
        parts[-1].append(tensor)
        room -= tensor.size
    count = len(parts)
    names = [ONE_FILE] if count == 1 else [_part_name(i, count) for i in range(count)]
    widest = [sorted(part, key=lambda each: -each.dtype.itemsize) for part in parts]
    return dict(zip(names, widest, strict=True))


def header_of(tensors: Sequence[Planned]) -> bytes:
    """Return the header of a file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.size],
        }
        start += tensor.size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_index(folder: Path, files: Mapping[str, Sequence[Planned]]) -> None:
    """Write the index of tensors, if there are several files."""
    if len(files) == 1:
        return
    total = sum(tensor.size for part in files.values() for tensor in part)
    named = {tensor.name: file for file, part in files.items() for tensor in part}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(named.items()))}
    write_file(folder / INDEX, json.dumps(index, indent=2) + "\n")


def write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    """Append the bytes of a contiguous CPU tensor."""
    size = tensor.numel() * tensor.itemsize
    if size:  # without numpy, which torch does not need
        file.write((ctypes.c_char * size).from_address(tensor.data_ptr()))


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, renamed to `path` at the end or removed after an error.

    Raises:
        ExchangeError: `path` exists and is no empty folder.
        FileError: The folder can't be made.
    """
    check_free(path)
    path = path.absolute()
    temporary = path.with_name(f".{path.name[:100]}.tmp-{os.urandom(16).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    except OSError as error:
        raise FileError(path, f"cannot make it: {error.strerror or error}") from error
    try:
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        check_free(path)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(path.parent)


def check_free(path: Path) -> None:
    """Raise ExchangeError if a path exists and is no empty folder."""
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise ExchangeError(f"{path} exists; name a folder that does not, or is empty")


def _part_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
