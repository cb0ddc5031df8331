"""A lock held by the kernel, which releases it when the process ends for any reason."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from pathlib import Path

from mt_files.error import FileError, LockedError, printable, system_error
from mt_files.reading import parse_json

_MAX_BYTES = 4096
_TRIES, _PAUSE_SECONDS = 25, 0.002
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}


class FolderLock:
    """A lock on a folder, as a context manager: one exclusive holder, or any number of shared ones.

    It is a `flock` on a small file in the folder, which stays there. A holder that forks shares its
    lock with the child.

    Attributes:
        held: Whether the lock is held. Inside the block it is False only if the file system has no
            locks or, for a shared lock, can't be written: tell the user if it matters.
    """

    def __init__(
        self, folder: str | Path, *, purpose: str, shared: bool = False, name: str = ".lock"
    ) -> None:
        """Prepare a lock; entering the block takes it.

        Args:
            folder: An existing folder.
            purpose: Activity of the holder, such as `training`, for the error message of others.
            shared: Whether other shared holders are allowed.
            name: Name of the lock file in the folder.
        """
        self.folder = Path(folder)
        self.purpose = purpose
        self.shared = shared
        self.held = False
        self._path = self.folder / name
        self._descriptor: int | None = None

    def __enter__(self) -> FolderLock:
        """Take the lock at once, or fail.

        Raises:
            LockedError: Another process holds it; the message names the process.
            FileError: The lock file can't be created.
        """
        self._descriptor = self._open()
        if self._descriptor is None:
            return self
        try:
            self.held = self._take(self._descriptor)
            if self.held and not self.shared:
                self._sign(self._descriptor)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            if self.held and not self.shared:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, 0)
            if self.held:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # for forked children too
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self.held = False

    def _open(self) -> int | None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(self._path, flags, 0o666)
        except OSError as error:
            if self.shared and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                return None  # a folder that we can't write won't be changed by us either
            raise system_error(self._path, "lock it", error) from error

    def _take(self, descriptor: int) -> bool:
        wanted = fcntl.LOCK_SH if self.shared else fcntl.LOCK_EX
        for is_last in [*[False] * _TRIES, True]:
            try:
                fcntl.flock(descriptor, wanted | fcntl.LOCK_NB)
            except BlockingIOError:
                # A holder without a name has just come, or is about to go.
                if is_last or os.fstat(descriptor).st_size:
                    raise LockedError(self.folder, self._holder(descriptor)) from None
                time.sleep(_PAUSE_SECONDS)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return False
                raise system_error(self._path, "lock it", error) from error
            else:
                break
        return True

    def _sign(self, descriptor: int) -> None:
        holder = {
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "purpose": self.purpose,
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        with contextlib.suppress(OSError):  # a full disk: it is locked all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)

    def _holder(self, descriptor: int) -> str:
        if not self.shared and _is_free_for_readers(descriptor):
            return "is being read by another process; wait until it is done, or end it"
        try:
            holder = parse_json(os.pread(descriptor, _MAX_BYTES, 0), name=self._path)
            who = f"process {holder['pid']} on {holder['host']}"
            what = f"{holder['purpose']}, since {holder['since']}"
        except (FileError, OSError, KeyError, TypeError):
            return "is in use by another process; wait until it is done, or end it"
        return printable(
            f"is in use by {who} ({what}); wait until it is done, or end it, or use another folder"
        )


def _is_free_for_readers(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
