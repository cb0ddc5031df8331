"""Atomic and durable writing of files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mt_files.error import FileError, printable, system_error

_TEMPORARY = re.compile(rb"\..+\.tmp-[0-9a-f]{32}", re.DOTALL)
_NAME_BYTES = 200  # of the final name in the temporary one; file systems allow 255 in all


def write_file(path: str | Path, *parts: bytes | memoryview | str) -> None:
    """Create or replace a file; see `writing`. Text is written as UTF-8.

    Raises:
        FileError: It can't be written; the old file is unchanged.
    """
    with writing(path) as file:
        for part in parts:
            file.write(part.encode() if isinstance(part, str) else part)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[BinaryIO]:
    """Replace a file atomically: afterwards it is complete or unchanged, whatever happens.

    The content goes to a new file of a random name beside `path`, which is synced and then renamed
    to `path`; the folder is synced last. A link at `path` is replaced, not followed. If the block
    raises, the new file is removed; if the process is killed, `remove_temporaries` removes it.

    Yields:
        The new file, open for writing and reading.

    Raises:
        FileError: It can't be written; for a full disk, the message has the free space.
    """
    path = Path(path)
    temporary, file = _create(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)  # still locked, so that it is not taken for a leftover
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # An error of another file, which the block itself could not open, is passed on unchanged.
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            raise _write_error(path, error) from error
        raise
    sync(path.parent)


def sync(path: str | Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk.

    Raises:
        FileError: The system refuses it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise system_error(path, "sync it", error) from error


def remove_temporaries(folder: str | Path) -> list[Path]:
    """Remove the temporary files of killed writers from a folder, but not of active writers.

    A writer holds a kernel lock on its file, which ends with its process. If the file system has no
    locks, nothing is removed.

    Returns:
        The removed files.
    """
    removed = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            name = os.fsencode(entry.name)
            if _TEMPORARY.fullmatch(name) and entry.is_file(follow_symlinks=False):
                path = Path(entry.path)
                if _is_left(path):
                    path.unlink(missing_ok=True)
                    removed.append(path)
    return removed


def _create(path: Path) -> tuple[Path, BinaryIO]:
    """Create a new locked file beside `path`."""
    name = os.fsdecode(os.fsencode(path.name)[:_NAME_BYTES])
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        temporary = path.with_name(f".{name}.tmp-{os.urandom(16).hex()}")
        try:
            descriptor = os.open(temporary, flags, 0o666)
        except OSError as error:
            raise _write_error(path, error) from error
        with contextlib.suppress(OSError):  # no locks on this file system
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:  # else it was removed as a leftover before it was locked
            return temporary, os.fdopen(descriptor, "w+b")
        os.close(descriptor)


def _is_left(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return regular
    finally:
        os.close(descriptor)


def _write_error(path: Path, error: OSError) -> FileError:
    wrapped = system_error(path, "write it", error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            room = os.statvfs(path.parent)
            free = room.f_bavail * room.f_frsize
            problem = f"{wrapped.problem}; {free} bytes are free in {printable(path.parent)}"
            wrapped = FileError(path, problem)
    wrapped.errno = error.errno
    return wrapped
