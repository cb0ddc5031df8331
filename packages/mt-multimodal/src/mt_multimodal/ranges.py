"""Random access to ranges of bytes in files and objects, by several threads at once."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterator
from typing import Protocol

import mt_files
from mt_data import DataFileError
from mt_files import find_object, object_url

BLOCK = 4 << 20
_ENDS = 1 << 16


class Ranges(Protocol):
    """Bytes with random access to any range.

    Attributes:
        name: Name for messages.
        size: Number of bytes.
        version: Text that differs for another content of the same size.
    """

    name: str
    size: int
    version: str

    def read(self, start: int, count: int) -> bytes:
        """Return bytes [start, start + count).

        Raises:
            DataFileError: There are fewer bytes, or they can't be read.
            ObjectError: The object has changed, or the store does not answer.
        """
        ...


class LocalRanges:
    """A file on a disk. Its version is a digest of its first and its last 64 KiB."""

    def __init__(self, path: str) -> None:
        self.name = path
        with mt_files.open_file(path) as file:
            self._descriptor = os.dup(file.fileno())
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size
        first = self.read(0, min(_ENDS, self.size))
        begin = max(0, self.size - _ENDS)
        ends = first + self.read(begin, self.size - begin)
        self.version = hashlib.sha256(ends).hexdigest()[:32]

    def read(self, start: int, count: int) -> bytes:
        """Return bytes [start, start + count)."""
        try:
            found = os.pread(self._descriptor, count, start)
        except OSError as error:
            raise DataFileError(self.name, f"can't be read at byte {start}: {error}") from None
        if len(found) != count:
            raise DataFileError(
                self.name, f"ends at byte {start + len(found)}, and {start + count} are needed"
            )
        return found


class StoredRanges:
    """An object in a store; its version is the ETag."""

    def __init__(self, url: str) -> None:
        self._object = find_object(url)
        self.name, self.size = url, self._object.size
        self.version = self._object.version

    def read(self, start: int, count: int) -> bytes:
        """Return bytes [start, start + count)."""
        return bytes(self._object.read(start, count))


def open_ranges(path: str | os.PathLike[str]) -> Ranges:
    """Open a local file, or an object by its URL.

    Raises:
        FileError: There is no such file, or it is not a regular file.
        ObjectError: The store does not answer.
    """
    url = object_url(path)
    return LocalRanges(os.fspath(path)) if url is None else StoredRanges(url)


class Stream:
    """A reader of ranges in order, in blocks.

    Args:
        ranges: The bytes.

    Attributes:
        at: Number of bytes taken so far.
    """

    def __init__(self, ranges: Ranges) -> None:
        self.ranges, self.at = ranges, 0
        self._block, self._begin = b"", 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes, at most a block; the caller knows that they exist."""
        begin = self.at - self._begin
        if begin + count > len(self._block):
            size = min(max(BLOCK, count), self.ranges.size - self.at)
            self._block, self._begin, begin = self.ranges.read(self.at, size), self.at, 0
        self.at += count
        return self._block[begin : begin + count]

    def pieces(self, count: int) -> Iterator[bytes]:
        """Yield the next `count` bytes in pieces of at most a block."""
        while count:
            piece = self.take(min(count, BLOCK))
            count -= len(piece)
            yield piece
