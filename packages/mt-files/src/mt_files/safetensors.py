"""Files of safetensors without torch: headers and indexes of others, and our own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Protocol, TypeGuard, TypeVar

from mt_files.error import FileError
from mt_files.field import did_you_mean, shorten
from mt_files.reading import open_file, parse_json

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1},
        **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1},
    }
)
# The format's names of dtypes, and those of numpy and torch.
SAFETENSORS_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
        **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool"},
        **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"},
    }
)
MAX_TENSORS = 1 << 18  # of a folder; the largest published mixtures have half of it
_MAX_HEADER = 100_000_000  # limit of the format's own reader
_MAX_INDEX = 1 << 28
_MAX_DIMS = 32
_BLOCK = 1 << 20
_KEYS, _VALUES = 5, 5 + _MAX_DIMS  # of a tensor in a header
_METADATA = 1 << 16


class SafetensorsError(FileError):
    """A file of safetensors is damaged, or contradicts its index."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor in a file.

    Attributes:
        name: Name of the tensor.
        path: Path of the file.
        dtype: Name of its dtype in the format, a key of `ITEM_BYTES`.
        shape: Shape of the tensor.
        start: Offset of the first byte in the file.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


class StoredAs(Protocol):
    """A tensor to write: its name, shape, size in bytes, and the name of its dtype."""

    @property
    def name(self) -> str: ...  # noqa: D102 - the class describes them
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102
    @property
    def stored_as(self) -> str: ...  # noqa: D102


T = TypeVar("T", bound=StoredAs)


def open_safetensors(
    folder: Path, *, most: int = MAX_TENSORS, within: Path | None = None
) -> dict[str, TensorEntry]:
    """Return every tensor of a folder by name, from the headers alone.

    Args:
        folder: A folder with `model.safetensors`, or `model.safetensors.index.json` and its files.
        most: Largest number of tensors; a header with more is refused before it is parsed.
        within: Folder that symbolic links must not leave; by default `folder`.

    Raises:
        SafetensorsError: A file is missing or damaged, or contradicts the index; the message names
            file and tensor.
        FileError: A file can't be read, or a link leads out of the folder.
    """
    within = folder if within is None else within
    if (folder / ONE_FILE).exists():
        entries = safetensors_in(folder / ONE_FILE, most=most, within=within)
        return {found.name: found for found in entries}
    if not (folder / INDEX).exists():
        raise SafetensorsError(folder, f"has neither {ONE_FILE} nor {INDEX}")
    named = _index(folder / INDEX, most, within)
    found: dict[str, TensorEntry] = {}
    for file in sorted(set(named.values())):
        for tensor in safetensors_in(folder / file, most=most, within=within):
            if named.get(tensor.name) != file:
                says = named.get(tensor.name, "nowhere")
                raise SafetensorsError(
                    folder / INDEX,
                    f"tensor {tensor.name} is in {file}, and the index says {says}; restore the "
                    "index",
                )
            found[tensor.name] = tensor
    for name in named:
        if name not in found:
            raise SafetensorsError(
                folder / named[name],
                f"lacks tensor {name}, which {INDEX} says is there; restore the file",
            )
    return found


def safetensors_in(
    path: Path, *, most: int = MAX_TENSORS, within: Path | None = None
) -> Iterator[TensorEntry]:
    """Yield the tensors of a file, from its header alone; see `open_safetensors`."""
    with open_file(path, within=within) as file:
        total = os.fstat(file.fileno()).st_size
        size = int.from_bytes(file.read(8), "little")
        if total < 8 or size > min(_MAX_HEADER, total - 8):
            raise SafetensorsError(
                path,
                f"is no complete safetensors file: {total} bytes, and its header would have "
                f"{size}; download or copy it again",
            )
        entries = parse_json(_counted(path, file, size, most), name=path)
    if not isinstance(entries, dict):
        raise SafetensorsError(path, "its header is no mapping of tensors; restore it")
    entries.pop("__metadata__", None)
    end = 0
    places = [(_place(path, key, entry), key, entry) for key, entry in entries.items()]
    for (start, stop), key, entry in sorted(places, key=lambda item: item[0]):
        dtype, shape = _kind(path, key, entry)
        needed = prod(shape) * ITEM_BYTES[dtype]
        if start != end or stop - start != needed:
            raise SafetensorsError(
                path,
                f"tensor {key} of {needed} bytes is said to be at {start} to {stop}, behind a "
                f"tensor that ends at {end}; the file is damaged, restore it",
            )
        end = stop
        yield TensorEntry(name=key, path=path, dtype=dtype, shape=shape, start=8 + size + start)
    if 8 + size + end != total:
        raise SafetensorsError(
            path,
            f"has {total} bytes, and its header describes {8 + size + end}; it was not copied "
            "whole, or is damaged: restore it",
        )


def plan_safetensors(tensors: Sequence[T], limit: int) -> dict[str, list[T]]:
    """Distribute tensors to files of at most `limit` bytes; a larger tensor gets its own file.

    In a file the widest elements come first, so that all are aligned.

    Args:
        tensors: Tensors in the order of the files.
        limit: Largest size of a file's tensors, in bytes.
    """
    parts: list[list[T]] = [] if tensors else [[]]
    room = 0
    for tensor in tensors:
        if not parts or tensor.size > room:
            parts.append([])
            room = limit
        parts[-1].append(tensor)
        room -= tensor.size
    count = len(parts)
    names = [ONE_FILE] if count == 1 else [_part_name(i, count) for i in range(count)]
    widest = [sorted(part, key=lambda each: -ITEM_BYTES[each.stored_as]) for part in parts]
    return dict(zip(names, widest, strict=True))


def safetensors_header(tensors: Sequence[StoredAs]) -> bytes:
    """Return the header of a file, after which the tensors' bytes follow in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.stored_as,
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.size],
        }
        start += tensor.size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def safetensors_index(files: Mapping[str, Sequence[StoredAs]]) -> str:
    """Return the index of several files, the content of `model.safetensors.index.json`."""
    total = sum(tensor.size for part in files.values() for tensor in part)
    named = {tensor.name: file for file, part in files.items() for tensor in part}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(named.items()))}
    return json.dumps(index, indent=2) + "\n"


def _index(path: Path, most: int, within: Path) -> dict[str, str]:
    with open_file(path, within=within) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_INDEX:
            raise SafetensorsError(path, f"has {size} bytes; at most {_MAX_INDEX} are read")
        index = parse_json(_counted(path, file, size, most), name=path)
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict) or not named:
        raise SafetensorsError(path, "has no weight_map from tensors to files; restore it")
    for name, file in named.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and "\0" not in file
        if not plain or file != os.path.basename(file):
            raise SafetensorsError(
                path,
                f"tensor {shorten(name)} is said to be in {shorten(file)}, which is no name of a "
                ".safetensors file in this folder",
            )
    return named


def _counted(path: Path, file: BinaryIO, size: int, most: int) -> bytes:
    """Return the next `size` bytes of a file, the JSON of at most `most` tensors.

    Counting marks takes no memory and milliseconds, where parsing makes objects.

    Raises:
        SafetensorsError: It has far more keys or values than these tensors need.
    """
    start, left = file.tell(), size
    found = {b":": 0, b",": 0}
    while left > 0 and (block := file.read(min(left, _BLOCK))):
        left -= len(block)
        for mark in found:
            found[mark] += block.count(mark)
    if found[b":"] > _KEYS * most + _METADATA or found[b","] > _VALUES * most + _METADATA:
        raise SafetensorsError(
            path,
            f"describes far more tensors than the {most} that it may have for this model "
            f"({found[b':']} keys and {found[b',']} values); restore it",
        )
    file.seek(start)
    return file.read(size)


def _place(path: Path, name: str, entry: Any) -> tuple[int, int]:
    place = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not _is_sizes(place) or len(place) != 2:
        raise SafetensorsError(path, f"tensor {shorten(name)} has no data_offsets; restore it")
    return place[0], place[1]


def _kind(path: Path, name: str, entry: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        hint = did_you_mean(str(dtype), ITEM_BYTES)
        raise SafetensorsError(path, f"tensor {name} has the dtype {shorten(dtype)}. {hint}")
    if not _is_sizes(shape) or len(shape) > _MAX_DIMS:
        raise SafetensorsError(path, f"tensor {name} has the shape {shorten(shape)}; restore it")
    return dtype, tuple(shape)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _part_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
