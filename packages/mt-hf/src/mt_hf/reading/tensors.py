"""Reading of safetensors files from others: one file, or several with an index."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeGuard

import torch
from mt_files import did_you_mean, open_file, parse_json, shorten
from mt_model import Sizes
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.reading.files import INDEX, ONE_FILE, root_of

_MAX_HEADER = 100_000_000  # limit of the format's own reader
_MAX_INDEX = 1 << 28
_MAX_DIMS = 32
_BLOCK = 1 << 20
_KEYS, _VALUES = 5, 5 + _MAX_DIMS  # of a tensor in a header
_METADATA = 1 << 16
MAX_TENSORS = 1 << 18  # of a folder; the largest published mixtures have half of it

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }
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
    if (folder / ONE_FILE).exists():
        return {found.name: found for found in tensors_in(folder, ONE_FILE, most)}
    if not (folder / INDEX).exists():
        pickled = (folder / "pytorch_model.bin").exists() or any(folder.glob("pytorch_model-*.bin"))
        way_out = "; pickled weights are not read: save them with transformers as safetensors"
        raise ExchangeError(
            f"{folder} has neither {ONE_FILE} nor {INDEX}{way_out if pickled else ''}"
        )
    named = _index(folder, most)
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(named.values())):
        for tensor in tensors_in(folder, file, most):
            if named.get(tensor.name) != file:
                says = named.get(tensor.name, "nowhere")
                raise ExchangeError(
                    f"{folder / INDEX}: tensor {tensor.name} is in {file}, and the index says "
                    f"{says}; restore the index"
                )
            found[tensor.name] = tensor
    for name in named:
        if name not in found:
            raise ExchangeError(
                f"{folder / named[name]}: lacks tensor {name}, which {INDEX} says is there; "
                "restore the file"
            )
    return found


def _index(folder: Path, most: int) -> dict[str, str]:
    path = folder / INDEX
    with open_file(path, within=root_of(folder)) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_INDEX:
            raise ExchangeError(f"{path}: has {size} bytes; at most {_MAX_INDEX} are read")
        index = parse_json(_counted(path, file, size, most), name=path)
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict) or not named:
        raise ExchangeError(f"{path}: has no weight_map from tensors to files; restore it")
    for name, file in named.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and "\0" not in file
        if not plain or file != os.path.basename(file):
            raise ExchangeError(
                f"{path}: tensor {shorten(name)} is said to be in {shorten(file)}, which is no "
                "name of a .safetensors file in this folder"
            )
    return named


def _counted(path: Path, file: BinaryIO, size: int, most: int) -> bytes:
    """Return the next `size` bytes of a file, the JSON of at most `most` tensors.

    Counting marks takes no memory and milliseconds, where parsing makes objects.

    Raises:
        ExchangeError: It has far more keys or values than these tensors need.
    """
    start, left = file.tell(), size
    found = {b":": 0, b",": 0}
    while left > 0 and (block := file.read(min(left, _BLOCK))):
        left -= len(block)
        for mark in found:
            found[mark] += block.count(mark)
    if found[b":"] > _KEYS * most + _METADATA or found[b","] > _VALUES * most + _METADATA:
        raise ExchangeError(
            f"{path}: describes far more tensors than the {most} that it may have for this model "
            f"({found[b':']} keys and {found[b',']} values); restore it"
        )
    file.seek(start)
    return file.read(size)


def tensors_in(folder: Path, name: str, most: int) -> Iterator[StoredTensor]:
    """Yield the tensors of a file, from its header alone; see `open_tensors`."""
    path, root = folder / name, root_of(folder)
    with open_file(path, within=root) as file:
        total = os.fstat(file.fileno()).st_size
        size = int.from_bytes(file.read(8), "little")
        if total < 8 or size > min(_MAX_HEADER, total - 8):
            raise ExchangeError(
                f"{path}: is no complete safetensors file: {total} bytes, and its header would "
                f"have {size}; download or copy it again"
            )
        entries = parse_json(_counted(path, file, size, most), name=path)
    if not isinstance(entries, dict):
        raise ExchangeError(f"{path}: its header is no mapping of tensors; restore it")
    entries.pop("__metadata__", None)
    end = 0
    places = [(_place(path, key, entry), key, entry) for key, entry in entries.items()]
    for (start, stop), key, entry in sorted(places, key=lambda item: item[0]):
        dtype, shape = _kind(path, key, entry)
        needed = prod(shape) * dtype.itemsize
        if start != end or stop - start != needed:
            raise ExchangeError(
                f"{path}: tensor {key} of {needed} bytes is said to be at {start} to {stop}, "
                f"behind a tensor that ends at {end}; the file is damaged, restore it"
            )
        end = stop
        yield StoredTensor(
            name=key, path=path, root=root, dtype=dtype, shape=shape, start=8 + size + start
        )
    if 8 + size + end != total:
        raise ExchangeError(
            f"{path}: has {total} bytes, and its header describes {8 + size + end}; it was not "
            "copied whole, or is damaged: restore it"
        )


def _place(path: Path, name: str, entry: Any) -> tuple[int, int]:
    place = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not _is_sizes(place) or len(place) != 2:
        raise ExchangeError(f"{path}: tensor {shorten(name)} has no data_offsets; restore it")
    return place[0], place[1]


def _kind(path: Path, name: str, entry: Mapping[str, Any]) -> tuple[torch.dtype, Sizes]:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        hint = did_you_mean(str(dtype), DTYPES)
        raise ExchangeError(f"{path}: tensor {name} has the dtype {shorten(dtype)}. {hint}")
    if not _is_sizes(shape) or len(shape) > _MAX_DIMS:
        raise ExchangeError(f"{path}: tensor {name} has the shape {shorten(shape)}; restore it")
    return DTYPES[dtype], tuple(shape)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _view(pages: mmap.mmap, offset: int, dtype: torch.dtype, count: int) -> Tensor:
    """View bytes as elements; unaligned bytes are copied."""
    if offset % dtype.itemsize:
        raw = torch.frombuffer(
            pages, dtype=torch.uint8, offset=offset, count=count * dtype.itemsize
        )
        return raw.clone().view(dtype)
    return torch.frombuffer(pages, dtype=dtype, offset=offset, count=count)
