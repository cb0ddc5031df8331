"""Folders of safetensors: `model.safetensors`, or several files with an index."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from mt_files import (
    SAFETENSORS_DTYPES,
    open_safetensors,
    plan_safetensors,
    safetensors_header,
    safetensors_in,
    safetensors_index,
    write_file,
)

from mt_ckpt.array import ArraySpec
from mt_ckpt.error import CheckpointError
from mt_ckpt.exchange.arrays import Report, below, bytes_of, dtype_of, read_array, stored_name
from mt_ckpt.exchange.foreign import ForeignCheckpoint, ForeignTensor, MappedFiles, StoredBox
from mt_ckpt.load import ArrayReader

FILE_BYTES = 5_000_000_000
_INDEX = "model.safetensors.index.json"
_DTYPES = {name: getattr(torch, usual) for name, usual in SAFETENSORS_DTYPES.items()}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """An array to write; see `mt_files.StoredAs`."""

    name: str
    spec: ArraySpec

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def size(self) -> int:
        return bytes_of(self.spec)

    @property
    def stored_as(self) -> str:
        return _NAMES[dtype_of(self.spec)]


def export_safetensors(
    arrays: ArrayReader, folder: Path, *, prefix: str, file_bytes: int, report: Report
) -> None:
    """Write a checkpoint's arrays as safetensors files, one array in memory at a time.

    Args:
        arrays: The checkpoint.
        folder: An existing folder.
        prefix: Group to write, without its name; empty for everything.
        file_bytes: Largest size of a file's tensors; a larger tensor gets a file of its own.
        report: Called before each array.

    Raises:
        CheckpointError: The checkpoint is damaged, or has no such group.
    """
    specs = below(arrays, prefix)
    planned = [_Planned(name=name, spec=spec) for name, spec in specs.items()]
    files = plan_safetensors(planned, file_bytes)
    total, done = sum(each.size for each in planned), 0
    for name, part in files.items():
        with open(folder / name, "xb") as file:
            file.write(safetensors_header(part))
            for each in part:
                report(done, total)
                done += each.size
                values = read_array(arrays, stored_name(prefix, each.name))
                if each.size:
                    file.write((ctypes.c_char * each.size).from_address(values.data_ptr()))
    if len(files) > 1:
        write_file(folder / _INDEX, safetensors_index(files))


def open_foreign(path: Path) -> ForeignCheckpoint:
    """Return the tensors of a folder of safetensors, or of one file.

    Raises:
        CheckpointError: There are no safetensors files.
        SafetensorsError: A file is damaged, or contradicts the index.
    """
    if path.is_dir():
        entries, folder = open_safetensors(path).values(), path
    elif path.exists():
        entries, folder = list(safetensors_in(path)), path.parent
    else:
        raise CheckpointError(f"{path}: no such file or folder", file=str(path))
    tensors = {
        entry.name: ForeignTensor(
            dtype=_DTYPES[entry.dtype],
            shape=entry.shape,
            pieces=[
                StoredBox(
                    offsets=(0,) * len(entry.shape),
                    shape=entry.shape,
                    file=entry.path.name,
                    start=entry.start,
                )
            ],
        )
        for entry in entries
    }
    return ForeignCheckpoint(files=MappedFiles(folder), tensors=tensors)
