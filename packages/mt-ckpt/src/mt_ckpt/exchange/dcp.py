"""Checkpoints of torch.distributed.checkpoint (DCP): `.metadata` and `.distcp` files."""

from __future__ import annotations

import io
import math
import struct
import warnings
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from mt_files import open_file, read_bytes, shorten

from mt_ckpt.array import ArraySpec
from mt_ckpt.error import CheckpointError
from mt_ckpt.exchange.arrays import Report, below, bytes_of, dtype_of, read_array, stored_name
from mt_ckpt.exchange.foreign import (
    MAX_DIMS,
    MAX_PIECES,
    ForeignCheckpoint,
    ForeignTensor,
    MappedFiles,
    StoredBox,
)
from mt_ckpt.exchange.inert_pickle import Record, StoredView, read_pickle
from mt_ckpt.load import ArrayReader

METADATA = ".metadata"
_MAX_METADATA = 1 << 29
_LEAST_METADATA = 1 << 20  # always readable; larger metadata must describe more tensors
_MAX_PICKLE = 1 << 20  # bytes of a tensor's description, or of plain values
_MAX_KEPT = 1 << 8  # pickles of tensors
_LOCAL_HEADER = 30
_MODULE = "torch.distributed.checkpoint."
_MALFORMED = (
    *(ValueError, TypeError, LookupError, AttributeError, OverflowError, EOFError, RuntimeError),
    *(struct.error, zipfile.BadZipFile),
)


def export_dcp(arrays: ArrayReader, folder: Path, *, prefix: str, report: Report) -> None:
    """Write a checkpoint's arrays with torch's own writer, one array in memory at a time.

    Args:
        arrays: The checkpoint.
        folder: An existing folder.
        prefix: Group to write, without its name; empty for everything.
        report: Called before each array.

    Raises:
        CheckpointError: The checkpoint is damaged, or has no such group.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    specs = below(arrays, prefix)

    class Planner(DefaultSavePlanner):
        """Reads each array when it is written; the plan needs shapes and dtypes only."""

        done = 0

        def lookup_object(self, index: Any) -> torch.Tensor:
            report(self.done, sum(map(bytes_of, specs.values())))
            self.done += bytes_of(specs[index.fqn])
            return read_array(arrays, stored_name(prefix, index.fqn))

    state = {name: _described(spec) for name, spec in specs.items()}
    writer = dcp.FileSystemWriter(folder)
    planner = Planner(flatten_state_dict=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as asked for
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)


def open_dcp(folder: Path) -> ForeignCheckpoint:
    """Return the tensors of a checkpoint of DCP; its pickles are read as data (`inert_pickle`).

    Raises:
        CheckpointError: A file is missing or damaged, or a pickle names more than tensors need.
    """
    path = folder / METADATA
    if not path.exists():
        raise CheckpointError(
            f"{folder} has no {METADATA}, so it is no whole checkpoint of "
            "torch.distributed.checkpoint; name the folder of one step",
            file=str(path),
        )
    # Each tensor takes more bytes in its archive than its description here does.
    data = sum(each.lstat().st_size for each in folder.iterdir() if each != path)
    limit = min(_LEAST_METADATA + data, _MAX_METADATA)
    content = read_bytes(path, limit=limit, within=folder)
    files = MappedFiles(folder)
    try:
        return _Metadata(files, read_pickle(content, name=str(path))).checkpoint()
    except _MALFORMED as error:
        raise CheckpointError(
            f"{path}: does not describe tensors as DCP does: {error}; restore it from a copy",
            file=str(path),
        ) from error


class _Metadata:
    """The content of `.metadata`."""

    def __init__(self, files: MappedFiles, found: Any) -> None:
        if not isinstance(found, Record) or found.kind != f"{_MODULE}metadata.Metadata":
            raise ValueError("it is no Metadata")
        self._files, self._pickles = files, dict[bytes, Any]()
        self._entries: dict[str, Record] = found.get("state_dict_metadata", dict)
        self._places: dict[str, dict[tuple[int, ...], Record]] = {}
        for index, info in found.get("storage_data", dict).items():
            offset = index.state.get("offset") if isinstance(index.state, dict) else None
            places = self._places.setdefault(index.get("fqn", str), {})
            places[() if offset is None else _sizes(offset)] = info
        self._check_places()

    def _check_places(self) -> None:
        """Raise ValueError if parts of files overlap, so that no byte is read twice."""
        found = sorted(
            (info.get("relative_path", str), info.get("offset", int), info.get("length", int))
            for places in self._places.values()
            for info in places.values()
        )
        for (file, start, length), (other, following, _) in pairwise(found):
            if file == other and start + length > following:
                raise ValueError(f"parts of {shorten(file)} overlap at {shorten(following)}")

    def checkpoint(self) -> ForeignCheckpoint:
        """Return the checkpoint."""
        tensors, skipped = {}, []
        for name, entry in self._entries.items():
            if entry.kind != f"{_MODULE}metadata.TensorStorageMetadata":
                skipped.append(name)
                continue
            tensors[name] = self._tensor(name, entry)
            tensors[name].check(name)
        return ForeignCheckpoint(files=self._files, tensors=tensors, skipped=skipped)

    def _tensor(self, name: str, entry: Record) -> ForeignTensor:
        shape = _sizes(entry.get("size", tuple))
        state = entry.get("properties", Record).state
        dtype = state[0] if isinstance(state, tuple) else None
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{shorten(name)} has no dtype")
        chunks, pieces = entry.get("chunks", list), []
        if len(chunks) > MAX_PIECES or len(shape) > MAX_DIMS:
            raise ValueError(f"{shorten(name)} has {len(chunks)} pieces of {len(shape)} dims")
        for chunk in chunks:
            offsets = _sizes(chunk.get("offsets", tuple))
            place = self._places.get(name, {}).get(offsets)
            if place is None:
                raise ValueError(f"{shorten(name)} has no data at {shorten(offsets)}")
            box = _sizes(chunk.get("sizes", tuple))
            pieces.append(self._piece(name, dtype, offsets, box, place))
        return ForeignTensor(dtype=dtype, shape=shape, pieces=pieces)

    def _piece(
        self,
        name: str,
        dtype: torch.dtype,
        offsets: tuple[int, ...],
        box: tuple[int, ...],
        place: Record,
    ) -> StoredBox:
        if place.state.get("transform_descriptors"):
            raise ValueError(f"{shorten(name)} is compressed; save it without extensions")
        file = place.get("relative_path", str)
        at, length = _sizes((place.get("offset", int), place.get("length", int)))
        window, where = _Window(self._files, file, at, length), f"{shorten(file)}: {shorten(name)}"
        view, start, checksum = _stored_view(window, where, self._pickles)
        if view.dtype != dtype or view.shape != box:
            held = f"{view.dtype} of {shorten(view.shape)}, not {dtype} of {shorten(box)}"
            raise ValueError(f"{shorten(name)}: {shorten(file)} holds {held}")
        return StoredBox(
            offsets=offsets,
            shape=box,
            file=file,
            start=start + view.start * dtype.itemsize,
            strides=view.strides,
            checksum=checksum,
        )


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, files: MappedFiles, file: str, start: int, length: int) -> None:
        files.part(file, start + length, 0)  # zipfile would hide why a file can't be read
        self._files, self._file, self._at = files, file, 0
        self.start, self.length = start, length

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError("a place before the file")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self.length - self._at)
        size = left if size is None or size < 0 else min(size, left)
        content = self._files.part(self._file, self.start + self._at, size)
        self._at += size
        return content


def _stored_view(
    window: _Window, name: str, pickles: dict[bytes, Any]
) -> tuple[StoredView, int, tuple[int, int, int] | None]:
    """Return the tensor in an archive of `torch.save`.

    Args:
        window: The archive.
        name: Its name in messages.
        pickles: Parsed pickles by their bytes. Tensors with equal dtype, shape and strides have
            equal pickles, and there may be very many tensors.

    Returns:
        The tensor, the start of its storage in the file, and the storage's checksum.
    """
    with zipfile.ZipFile(window) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        order = entries.get("byteorder")
        if order is not None and _content(archive, order, name) != b"little":
            raise ValueError(f"{name} is big-endian")
        content = _content(archive, entries["data.pkl"], name)
        view = pickles.get(content) or read_pickle(content, name=name)
        if not isinstance(view, StoredView):
            raise TypeError(f"{name} is no tensor")
        if len(pickles) < _MAX_KEPT:
            pickles[content] = view
        storage = entries[f"data/{view.key}"]
    if storage.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed")
    window.seek(storage.header_offset)
    header = window.read(_LOCAL_HEADER)
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = storage.header_offset + _LOCAL_HEADER + names
    reach = [(n - 1) * step for n, step in zip(view.shape, view.strides, strict=True)]
    last = 0 if 0 in view.shape else view.start + sum(reach) + 1
    if math.prod(view.shape) > max(0, last - view.start):
        raise ValueError(f"{name} has elements that overlap")
    if last * view.dtype.itemsize > storage.file_size or start + storage.file_size > window.length:
        raise ValueError(f"{name} is larger than its storage")
    # torch.save writes 0 if it is told to compute no checksums.
    start += window.start
    return view, start, (start, storage.file_size, storage.CRC) if storage.CRC else None


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str) -> bytes:
    if entry.file_size > _MAX_PICKLE or entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name}: {shorten(entry.filename)} has {entry.file_size} bytes")
    if not entry.CRC:  # torch.save was told to compute none
        del entry.CRC
    return archive.read(entry)


def read_archive(path: Path) -> Any:
    """Return the object that `torch.save` wrote, with tensors as `StoredView`s; see `read_pickle`.

    Raises:
        CheckpointError: The file names more than tensors and plain objects, or is damaged.
        FileError: The file can't be read.
    """
    with open_file(path, within=path.parent) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                found = [each for each in archive.infolist() if each.filename.endswith("data.pkl")]
                content = _content(archive, found[0], str(path))
        except _MALFORMED as error:
            raise CheckpointError(f"{path}: {error}; restore it", file=str(path)) from error
    return read_pickle(content, name=str(path))


def _sizes(values: Any) -> tuple[int, ...]:
    if not all(type(each) is int and 0 <= each < 1 << 62 for each in values):
        raise ValueError("sizes are no integers")
    return tuple(values)


def _described(spec: ArraySpec) -> torch.Tensor:
    """Return a tensor of this shape and dtype without memory."""
    return torch.empty(spec.shape, dtype=dtype_of(spec), device="meta")
