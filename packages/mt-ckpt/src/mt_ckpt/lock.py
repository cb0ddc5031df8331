"""Step directories that readers hold: a kernel lock on the manifest, and what a save makes of it.

`mt_files.FolderLock` makes a file in the folder; a checkpoint holds nothing but what its manifest
lists, and may be read by who can't write there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mt_ckpt.disk import disk_errors
from mt_ckpt.manifest import MANIFEST, open_manifest

# Where the file system knows no locks, a step stays for this long after a newer one was committed.
GRACE_SECONDS = 60.0
POLL_SECONDS = 0.002


def share(path: Path) -> BinaryIO | None:
    """Hold a step directory for reading.

    Returns:
        An open file, which holds it until it is closed; None if the directory is being removed.

    Raises:
        CheckpointError: It is no checkpoint, or none any more.
    """
    file = open_manifest(path)
    held = _lock(file.fileno(), fcntl.LOCK_SH)
    if held is not False and _is_at(file.fileno(), path / MANIFEST):
        return file
    file.close()
    return None


@contextlib.contextmanager
def claim(path: Path, *, superseded: float, wait: float = 0.0) -> Iterator[bool]:
    """Yield whether a step directory may be removed: no reader holds it, and none can any more.

    Args:
        path: The step directory.
        superseded: When a newer one was committed, in seconds since the epoch.
        wait: How many seconds to wait for its readers.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with disk_errors("open", path / MANIFEST):
        try:  # network file systems want a writer for an exclusive lock
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
    """Whether the open file still has this path: it may have been moved before it was locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _lock(descriptor: int, kind: int) -> bool | None:
    """Try to lock: whether it worked, or None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
