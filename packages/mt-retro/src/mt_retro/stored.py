"""Arrays whose bytes are checked before they are used, and the records beside them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import numpy as np
from mt_data import DataError, DataFileError
from mt_files import (
    Checks,
    FileError,
    MissingFileError,
    SchemaError,
    build,
    open_file,
    parse_json,
    read_bytes,
    shorten,
    to_plain,
    write_file,
)
from numpy.typing import NDArray

RECORD, PLAN = "record.json", "plan.json"
BLOCK = 1 << 20  # bytes with one digest
KINDS = {
    "vectors": ("folder of vectors", "mt_retro.embed_chunks"),
    "database": ("database", "mt-retro build"),
    "neighbours": ("folder of neighbours", "mt-retro query"),
}
_MOST_BYTES = 1 << 28  # of a record
_DIGEST = 64

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """An array in a file of numpy's format.

    Attributes:
        dtype: Name of the dtype.
        shape: Sizes of the dims.
        header: Number of bytes before the values.
        blocks: SHA-256 of each MiB of the file, one after the other.
    """

    dtype: Literal["float32", "int64"]
    shape: tuple[int, int]
    header: int
    blocks: str

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "header")
        if not checks.errors and (self.shape[0] < 0 or self.shape[1] < 1):
            checks.add("shape", f"{shorten(self.shape)}; it has 0 rows or more of 1 value or more")
        if not checks.errors and len(self.blocks) != _DIGEST * self.num_blocks:
            checks.add("blocks", f"{len(self.blocks)} digits, and {self.num_blocks} blocks")
        checks.done()

    @property
    def size(self) -> int:
        """Number of bytes in the file."""
        return self.header + prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def num_blocks(self) -> int:
        """Number of blocks with a digest."""
        return -(-self.size // BLOCK)


class ArrayWriter:
    """A writer of an array's file from its first row to its last, with the digests of its blocks.

    Args:
        file: The new file.
        dtype: Name of the dtype.
        shape: Sizes of the dims.
    """

    def __init__(self, file: BinaryIO, dtype: str, shape: tuple[int, int]) -> None:
        header = io.BytesIO()
        about = {"descr": np.dtype(dtype).newbyteorder("<").str, "fortran_order": False}
        np.lib.format.write_array_header_1_0(header, {**about, "shape": shape})
        self._file, self._dtype, self._shape = file, dtype, shape
        self._header = len(header.getvalue())
        self._digests: list[str] = []
        self._digest, self._room = hashlib.sha256(), BLOCK
        self.write(header.getvalue())

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes."""
        self._file.write(content)
        view = memoryview(content).cast("B")
        while len(view):
            part, view = view[: self._room], view[self._room :]
            self._digest.update(part)
            self._room -= len(part)
            if not self._room:
                self._end_block()

    def _end_block(self) -> None:
        self._digests.append(self._digest.hexdigest())
        self._digest, self._room = hashlib.sha256(), BLOCK

    def end(self) -> ArrayRecord:
        """Return the record of the complete array."""
        if self._room < BLOCK:
            self._end_block()
        return build(
            ArrayRecord,
            {
                "dtype": self._dtype,
                "shape": list(self._shape),
                "header": self._header,
                "blocks": "".join(self._digests),
            },
        )


class StoredArray:
    """An array in a mapped file; each block is checked before its first use.

    Args:
        path: The file.
        record: Its record.

    Raises:
        DataFileError: The file has another size; or, on use, a block has changed.
    """

    def __init__(self, path: Path, record: ArrayRecord) -> None:
        self.path, self.record = path, record
        with open_file(path, within=path.parent) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.size:
                text = f"has {size} bytes, and its record says {record.size}"
                raise DataFileError(str(path), f"{text}; restore it, or make it anew")
            self._bytes = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        dtype = np.dtype(record.dtype).newbyteorder("<")
        values = np.frombuffer(self._bytes, dtype, prod(record.shape), offset=record.header)
        self._values = values.reshape(record.shape)
        self._is_checked = np.zeros(record.num_blocks, np.bool_)

    def __len__(self) -> int:
        return len(self._values)

    def rows(self, start: int, stop: int) -> NDArray:
        """Return the rows [start, stop), without a copy."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"{self.path}: rows [{start}, {stop}) of {len(self)}")
        width = self._values.shape[1] * self._values.itemsize
        first, last = (self.record.header + number * width for number in (start, stop))
        self._check(np.arange(first // BLOCK, -(-last // BLOCK) if start < stop else 0))
        return self._values[start:stop]

    def gather(self, numbers: NDArray[np.int64]) -> NDArray:
        """Return the rows of these numbers."""
        width = self._values.shape[1] * self._values.itemsize
        first = (self.record.header + numbers * width) // BLOCK
        last = (self.record.header + (numbers + 1) * width - 1) // BLOCK
        for step in range(int((last - first).max(initial=0)) + 1):
            self._check(np.minimum(first + step, last))
        return self._values[numbers]

    def verify(self) -> None:
        """Check every block, even after an earlier check."""
        self._is_checked[:] = False
        self._check(np.arange(self.record.num_blocks))

    def _check(self, blocks: NDArray[np.int64]) -> None:
        if self._is_checked[blocks].all():
            return
        for block in np.unique(blocks[~self._is_checked[blocks]]).tolist():
            part = self._bytes[block * BLOCK : (block + 1) * BLOCK]
            expected = self.record.blocks[block * _DIGEST : (block + 1) * _DIGEST]
            if hashlib.sha256(part).hexdigest() != expected:
                raise DataFileError(
                    str(self.path),
                    f"bytes {block * BLOCK} to {block * BLOCK + len(part)} are not those that were "
                    "written; restore the file, or make it anew",
                )
            self._is_checked[block] = True


def digest_of(record: object) -> str:
    """Return the digest of a record, which does not depend on the paths in it."""
    return hashlib.sha256(_text(_without_paths(to_plain(record))).encode()).hexdigest()


def write_record(path: Path, record: object) -> None:
    """Write a dataclass or plain values with their digest, for `read_record`."""
    text = _text(to_plain(record))
    write_file(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n")


def read_record(folder: Path, kind: type[Record], name: str) -> Record:
    """Read the record of a folder.

    Args:
        folder: The folder.
        kind: Dataclass of the record.
        name: Kind of the folder: `database`, `vectors` or `neighbours`.

    Raises:
        DataFileError: The record is damaged, or the folder is of another kind.
        DataError: The folder has no record.
    """
    content = read_sealed(folder / RECORD)
    if content is None:
        if (folder / PLAN).exists():
            text = "is not complete: give the command that makes it again, and it goes on"
        else:
            what, maker = KINDS[name]
            text = f"has no {RECORD}, so it is no {what}; {maker} makes one"
        raise DataError(f"{folder} {text}")
    found = content.get("kind")
    if found != name:
        text = f"is of the kind {shorten(found)}, and a {KINDS[name][0]} is needed"
        raise DataFileError(str(folder / RECORD), text)
    try:
        return build(kind, content)
    except SchemaError as error:
        raise DataFileError(str(folder / RECORD), f"{error}; make it anew") from None


def kind_of(folder: Path) -> object:
    """Return the kind of a folder according to its record; None without a record."""
    return (read_sealed(folder / RECORD) or {}).get("kind")


def read_sealed(path: Path) -> dict[str, Any] | None:
    """Return the content of a record, after a check of its digest; None without a file."""
    try:
        content = read_bytes(path, limit=_MOST_BYTES, within=path.parent)
    except MissingFileError:
        return None
    digest, _, text = content.partition(b"\n")
    if hashlib.sha256(text[:-1]).hexdigest().encode() != digest or text[-1:] != b"\n":
        raise DataFileError(str(path), "is not as it was written; restore it, or make it anew")
    try:
        value = parse_json(text, name=path)
    except FileError as error:
        raise DataFileError(str(path), error.problem) from None
    if not isinstance(value, dict):
        raise DataFileError(str(path), f"holds {shorten(value)}; a record is needed")
    return value


def path_from(folder: Path, path: str | os.PathLike[str]) -> str:
    """Return a path as the record of a folder stores it, relative to the folder; a URL stays."""
    text = os.fspath(path)
    return text if "://" in text else os.path.relpath(text, folder)


def path_in(folder: Path, path: str) -> str:
    """Return the path, or the URL, that the record of a folder stores; see `path_from`."""
    return path if "://" in path else os.path.normpath(folder / path)


@contextlib.contextmanager
def naming(folder: Path, path: str) -> Iterator[str]:
    """Yield the path or URL in the record of a folder, to be opened in the `with` block.

    Raises:
        DataFileError: The path can't be opened; the message names the record too.
    """
    try:
        yield path_in(folder, path)
    except (DataError, FileError) as error:
        text = f"names {shorten(path)}, which can't be used: {error}"
        raise DataFileError(str(folder / RECORD), text) from error


def blocks_of(array: StoredArray, size: int) -> Iterator[tuple[int, NDArray]]:
    """Yield the rows of an array in blocks, each with the number of its first row."""
    for start in range(0, len(array), size):
        yield start, array.rows(start, min(start + size, len(array)))


def _text(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False)


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        kept = ((key, each) for key, each in value.items() if not key.endswith("_path"))
        return {key: _without_paths(each) for key, each in kept}
    return [_without_paths(each) for each in value] if isinstance(value, list) else value
