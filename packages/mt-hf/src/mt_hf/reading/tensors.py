"""Reading of safetensors files from others: one file, or several with an index."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch
from mt_files import (
    SAFETENSORS_DTYPES,
    SafetensorsError,
    TensorEntry,
    open_file,
    open_safetensors,
    safetensors_in,
)
from mt_model import Sizes
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.reading.files import WEIGHTS, root_of

MAX_TENSORS = 1 << 18  # of a folder; the largest published mixtures have half of it

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, usual) for name, usual in SAFETENSORS_DTYPES.items()}
)


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        name: Name of the tensor.
        path: Path of the file.
        root: Folder that symbolic links must stay within.
        dtype: Dtype of the elements.
        shape: Shape of the tensor.
        start: Offset of the first byte in the file.
    """

    name: str
    path: Path
    root: Path
    dtype: torch.dtype
    shape: Sizes
    start: int

    def map(self) -> Tensor:
        """Return the tensor as mapped pages of the file, which are read on first use.

        The mapping is private: writing to the tensor does not change the file.
        """
        count = prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        skipped = self.start % mmap.ALLOCATIONGRANULARITY
        size = count * self.dtype.itemsize
        with open_file(self.path, within=self.root) as file:
            if os.fstat(file.fileno()).st_size < self.start + size:
                raise ExchangeError(f"{self.path}: got shorter than tensor {self.name}; restore it")
            pages = mmap.mmap(
                file.fileno(), size + skipped, access=mmap.ACCESS_COPY, offset=self.start - skipped
            )
        return _view(pages, skipped, self.dtype, count).view(self.shape)


def open_tensors(folder: Path, most: int = MAX_TENSORS) -> dict[str, StoredTensor]:
    """Return every tensor of a folder by name, from the headers alone.

    Args:
        folder: A folder with `model.safetensors`, or `model.safetensors.index.json` and its files.
        most: Largest number of tensors; a header with more is refused before it is parsed.

    Raises:
        ExchangeError: A file is missing or damaged, or contradicts the index; the message names
            file and tensor.
        FileError: A file can't be read, or a link leads out of the folder.
    """
    if not any((folder / name).exists() for name in WEIGHTS):
        pickled = (folder / "pytorch_model.bin").exists() or any(folder.glob("pytorch_model-*.bin"))
        way_out = "; pickled weights are not read: save them with transformers as safetensors"
        has = " nor ".join(WEIGHTS)
        raise ExchangeError(f"{folder} has neither {has}{way_out if pickled else ''}")
    with _exchange_errors():
        found = open_safetensors(folder, most=most, within=root_of(folder))
    return {name: _stored(entry, folder) for name, entry in found.items()}


def tensors_in(folder: Path, name: str, most: int) -> Iterator[StoredTensor]:
    """Yield the tensors of a file, from its header alone; see `open_tensors`."""
    with _exchange_errors():
        for entry in safetensors_in(folder / name, most=most, within=root_of(folder)):
            yield _stored(entry, folder)


@contextlib.contextmanager
def _exchange_errors() -> Iterator[None]:
    try:
        yield
    except SafetensorsError as error:
        raise ExchangeError(str(error)) from error


def _stored(entry: TensorEntry, folder: Path) -> StoredTensor:
    return StoredTensor(
        name=entry.name,
        path=entry.path,
        root=root_of(folder),
        dtype=DTYPES[entry.dtype],
        shape=entry.shape,
        start=entry.start,
    )


def _view(pages: mmap.mmap, offset: int, dtype: torch.dtype, count: int) -> Tensor:
    """View bytes as elements; unaligned bytes are copied."""
    if offset % dtype.itemsize:
        raw = torch.frombuffer(
            pages, dtype=torch.uint8, offset=offset, count=count * dtype.itemsize
        )
        return raw.clone().view(dtype)
    return torch.frombuffer(pages, dtype=dtype, offset=offset, count=count)
