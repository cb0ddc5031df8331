"""Locks of step directories: shared for readers, exclusive for a save that removes one.

The lock is a kernel lock on the manifest. `mt_files.FolderLock` would create a file, but a
checkpoint contains only files of its manifest, and a reader may have no permission to write.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mt_ckpt.disk import disk_errors
from mt_ckpt.manifest import MANIFEST, open_manifest
from mt_ckpt.path import StoredPath

# On a file system without locks, a step stays this long after a newer one was committed.
GRACE_SECONDS = 60.0
STORE_GRACE_SECONDS = 600.0  # in an object store, which has no locks for readers
POLL_SECONDS = 0.002


def share(path: Path) -> BinaryIO | None:
    """Hold a step directory for reading.

    Returns:
        An open file that holds the directory until it is closed; None during a removal.

    Raises:
        CheckpointError: It is not, or no longer, a checkpoint.
    """
    file = open_manifest(path)
    if isinstance(path, StoredPath):
        file.close()
        return io.BytesIO()
    held = _lock(file.fileno(), fcntl.LOCK_SH)
    # The directory may have been moved between the open and the lock.
    if held is not False and _is_at(file.fileno(), path / MANIFEST):
        return file
    file.close()
    return None


@contextlib.contextmanager
def claim(path: Path, *, superseded: float, wait: float = 0.0) -> Iterator[bool]:
    """Yield whether a step directory may be removed, with readers locked out during the block.

    Args:
        path: The step directory.
        superseded: Time at which a newer step was committed, in seconds since the epoch.
        wait: Seconds to wait for its readers.
    """
    if isinstance(path, StoredPath):
        yield time.time() - superseded > STORE_GRACE_SECONDS
        return
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with disk_errors("open", path / MANIFEST):
        try:  # network file systems require write access for an exclusive lock
            descriptor = os.open(path / MANIFEST, os.O_RDWR | flags)
        except PermissionError:
            descriptor = os.open(path / MANIFEST, os.O_RDONLY | flags)
    try:
        deadline = time.monotonic() + wait
        while (locked := _lock(descriptor, fcntl.LOCK_EX)) is False:
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_SECONDS)
        yield time.time() - superseded > GRACE_SECONDS if locked is None else locked
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file still has this path; it may have moved before the lock."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _lock(descriptor: int, kind: int) -> bool | None:
    """Try to lock, and return the success; None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
