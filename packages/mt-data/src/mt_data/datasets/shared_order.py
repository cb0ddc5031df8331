"""Orders of large data sets in files: one process makes each, and all of a node map it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import mt_files
import numpy as np

from mt_data.datasets.stream import Stream
from mt_data.error import DataFileError

_MAGIC = b"MTORDER1"
_HEADER = struct.Struct("<8sQQI36x")  # magic, documents, bytes of a number, crc32; then the arrays
_BLOCK = 1 << 24


class OrderFolder:
    """A folder with the streams of a data set's epochs.

    The first process that asks for an epoch writes its file, and others wait for it. Files of
    epochs before the last two are removed; a process that has mapped one keeps it.

    Args:
        folder: The folder, created if missing; data sets may share one.
        identity: Digest of everything that decides the order.

    Raises:
        FileError: The folder can't be made.
    """

    def __init__(self, folder: str | Path, identity: str) -> None:
        self.folder, self._identity = Path(folder), identity
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"cannot make it: {error.strerror or error}"
            raise mt_files.FileError(self.folder, text) from error
        mt_files.remove_temporaries(self.folder)

    def stream(self, epoch: int, make: Callable[[], Stream]) -> Stream:
        """Return the stream of an epoch, from its file.

        Args:
            epoch: Number of the epoch.
            make: Function that computes the stream, for the first that asks.

        Raises:
            DataFileError: The file is damaged.
            FileError: The file can't be read or written.
        """
        path = self._path(epoch)
        if not path.exists():
            with self._alone():
                if not path.exists():
                    self._write(path, make())
                    self._path(epoch - 2).unlink(missing_ok=True)
        return self._map(path)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other process makes a file; without locks each process makes it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                lock = os.open(self.folder / f"{self._identity[:16]}.lock", flags, 0o666)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _path(self, epoch: int) -> Path:
        return self.folder / f"{self._identity[:16]}-epoch-{epoch}.order"

    def _write(self, path: Path, stream: Stream) -> None:
        parts = stream.ends.data.cast("B"), stream.documents.data.cast("B")
        crc = self._crc(*parts)
        count, size = len(stream.documents), stream.documents.itemsize
        mt_files.write_file(path, _HEADER.pack(_MAGIC, count, size, crc), *parts)

    def _map(self, path: Path) -> Stream:
        with mt_files.open_file(path) as file:
            try:
                content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except ValueError:  # an empty file can't be mapped
                content = memoryview(b"")
        if len(content) > _HEADER.size:
            _, count, size, crc = _HEADER.unpack(content[: _HEADER.size])
            rest = content[_HEADER.size :]
            is_ours = content[: _HEADER.size] == _HEADER.pack(_MAGIC, count, size, crc)
            is_whole = is_ours and size in (4, 8) and len(rest) == count * (8 + size)
            if is_whole and self._crc(rest) == crc:
                ends = np.frombuffer(rest, "<i8", count)
                documents = np.frombuffer(rest, f"<u{size}", count, offset=8 * count)
                return Stream(documents=documents, ends=ends)
        text = "is damaged: its bytes are not those that were written"
        raise DataFileError(str(path), f"{text}; remove it, and it is made again")

    def _crc(self, *parts: memoryview) -> int:
        """Return the CRC-32 of the identity and the parts; another order has another CRC."""
        crc = zlib.crc32(self._identity.encode())
        for part in parts:
            for start in range(0, len(part), _BLOCK):
                crc = zlib.crc32(part[start : start + _BLOCK], crc)
        return crc
