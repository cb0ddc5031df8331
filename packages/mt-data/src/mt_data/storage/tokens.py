"""The `.bin` file of a token dataset, on a disk or in an object store."""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from typing import Protocol

import mt_files
from mt_files import StoredObject

from mt_data.error import DataFileError


class TokenBytes(Protocol):
    """Bytes with reads of ranges."""

    @property
    def size(self) -> int:
        """Number of bytes."""
        ...

    @property
    def closed(self) -> bool:
        """Whether nothing can be read any more."""
        ...

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a view with the bytes from `offset` on."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class TokenFile:
    """Bytes of a file, read with `pread`: threads and forked processes may share it.

    Args:
        path: The file. It is in use while it is open: `IndexedWriter` does not replace it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        file = mt_files.open_file(path)
        self._descriptor = file.fileno()
        self._finalizer = weakref.finalize(self, file.close)
        with contextlib.suppress(OSError):  # no locks on this file system, or it is being replaced
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    @property
    def size(self) -> int:
        """Number of bytes."""
        return os.fstat(self._descriptor).st_size

    @property
    def closed(self) -> bool:
        """Whether nothing can be read any more."""
        return not self._finalizer.alive

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a view with the bytes from `offset` on.

        Raises:
            DataFileError: The file ends too early.
        """
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                raise DataFileError(
                    self._path,
                    f"offset {offset}: expected {len(view)} bytes, read {done}; "
                    "the file was cut short while open",
                )
            done += count

    def close(self) -> None:
        """Close the file."""
        self._finalizer()


class TokenObject:
    """Bytes of an object in a store; threads may share it, processes open their own.

    Args:
        stored: The object, in the version to read.
    """

    def __init__(self, stored: StoredObject) -> None:
        self._stored = stored
        self.closed = False

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self._stored.size

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a view with the bytes from `offset` on.

        Raises:
            ObjectError: The object has changed, or can't be read.
        """
        view[:] = self._stored.read(offset, len(view))

    def close(self) -> None:
        """Refuse further reads."""
        self.closed = True
