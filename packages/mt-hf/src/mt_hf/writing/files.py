"""Writing of safetensors files, tensor by tensor, in a folder that appears when it is complete."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import mt_files
import torch
from mt_files import OccupiedError, safetensors_index, write_file
from mt_model import Sizes
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.reading.files import INDEX
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

    @property
    def stored_as(self) -> str:
        """Name of the dtype in the format."""
        return _NAMES[self.dtype]


def write_index(folder: Path, files: Mapping[str, Sequence[Planned]]) -> None:
    """Write the index of tensors, if there are several files."""
    if len(files) > 1:
        write_file(folder / INDEX, safetensors_index(files))


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
    with mt_files.new_folder(path) as temporary:
        yield temporary


def check_free(path: Path) -> None:
    """Raise ExchangeError if a path exists and is no empty folder."""
    try:
        mt_files.check_free(path)
    except OccupiedError as error:
        raise ExchangeError(f"{path} {error.problem}") from error
