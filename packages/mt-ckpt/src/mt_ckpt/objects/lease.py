"""The lock on a folder of checkpoints in an object store: an object with the holder's name."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from mt_files import FileError, MissingFileError, parse_json

from mt_ckpt.disk import Disk, disk_errors
from mt_ckpt.error import CheckpointError
from mt_ckpt.objects.disk import key_of, store_of

# A holder renews its lease; another process takes over a lease that was not renewed for this time.
LEASE_SECONDS = 60.0
_RENEWALS = 4
_LONGEST_BYTES = 4096
_POLL_SECONDS = 0.5


class Lease:
    """A lock that names its holder and ends some time after the holder does.

    It is an object that conditional puts, each with a new random id, create, renew and give back.
    A thread renews it. Another process takes it over after its time has passed, by the clocks of
    the machines, or at once if the holder was a process of this machine and has ended. A former
    holder learns of the loss by `check`, which must precede any change that others may see.

    Args:
        disk: The store.
        path: Path of the object.
        purpose: Task of the holder, for the error messages of others.
    """

    def __init__(self, disk: Disk, path: Path, *, purpose: str) -> None:
        self._store, self._path, self._key = store_of(disk), path, key_of(path)
        self._purpose, self._id = purpose, uuid.uuid4().hex
        self._since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._version: dict[str, str] | None = None
        self._lost, self._end = False, threading.Event()
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="mt-ckpt-lease", daemon=True)

    def take(self) -> None:
        """Take the lease.

        If a holder on another machine is still alive, it renews its lease, and this fails;
        otherwise the lease ends some time later.

        Raises:
            CheckpointError: Another process holds it; the message names the process.
        """
        first = None
        with disk_errors("lock", self._path):
            while (holder := self._take()) is not None:
                first = first or holder
                if _is_here(holder) or holder.get("write") != first.get("write") or not holder:
                    raise CheckpointError(_in_use(self._path, holder), file=str(self._path))
                time.sleep(_POLL_SECONDS)
        self._thread.start()

    def give_back(self) -> None:
        """Give the lease back."""
        self._end.set()
        self._thread.join()
        if self._version is not None and not self._lost:
            with contextlib.suppress(FileError):  # it ends by itself then
                self._store.put_if(self._key, self._content(seconds=0.0), self._version)

    def check(self) -> None:
        """Renew the lease.

        Raises:
            CheckpointError: Another process has taken it over, or the store does not answer.
        """
        with self._turn, disk_errors("lock", self._path):
            if not self._lost:
                self._renew()
        if self._lost:
            holder = self._holder()[0] or {}
            text = f"{_in_use(self._path, holder)}. It has taken over from this process, which did "
            raise CheckpointError(f"{text}not renew its lock in time", file=str(self._path))

    def _keep(self) -> None:
        while not self._end.wait(LEASE_SECONDS / _RENEWALS):
            with self._turn, contextlib.suppress(FileError):  # the next time, or `check` tells
                if not self._lost:
                    self._renew()

    def _renew(self) -> None:
        version = self._store.put_if(self._key, self._content(), self._version)
        if version is None:  # or a renewal came through whose every answer was lost
            holder, found = self._holder()
            if holder is not None and holder.get("lease") == self._id:
                version = self._store.put_if(self._key, self._content(), found)
        self._lost, self._version = version is None, version or self._version

    def _take(self) -> dict[str, Any] | None:
        """Try to take the lease; return the holder if there is one."""
        holder, version = self._holder()
        if holder is not None and not _is_over(holder):
            return holder
        self._version = self._store.put_if(self._key, self._content(), version)
        if self._version is not None:
            return None
        return self._holder()[0] or {}

    def _holder(self) -> tuple[dict[str, Any] | None, dict[str, str] | None]:
        """Return the holder of the lease and the version of its object; None without the object."""
        try:
            content, info = self._store.get(self._key)
        except MissingFileError:
            return None, None
        try:
            holder = parse_json(content[:_LONGEST_BYTES], name=str(self._path))
        except FileError:
            holder = None
        return holder if isinstance(holder, dict) else {}, info.version

    def _content(self, *, seconds: float | None = None) -> bytes:
        return json.dumps(
            {
                "host": os.uname().nodename,
                "pid": os.getpid(),
                "machine": _machine(),
                "purpose": self._purpose,
                "since": self._since,
                "renewed": time.time(),
                "seconds": LEASE_SECONDS if seconds is None else seconds,
                "lease": self._id,
                "write": uuid.uuid4().hex,
            }
        ).encode()


def _is_over(holder: dict[str, Any]) -> bool:
    renewed, seconds, pid = (holder.get(name) for name in ("renewed", "seconds", "pid"))
    if not isinstance(renewed, int | float) or not isinstance(seconds, int | float):
        return False
    if time.time() > renewed + seconds:
        return True
    return _is_here(holder) and type(pid) is int and not _lives(pid)


def _is_here(holder: dict[str, Any]) -> bool:
    """Return whether the holder was started on this machine, among the processes that we see."""
    machine = _machine()
    return machine is not None and holder.get("machine") == machine


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True


def _machine() -> str | None:
    """Return the id of the boot and namespace, common to processes that see each other's ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _in_use(path: Path, holder: dict[str, Any]) -> str:
    if not holder:
        return f"{path}: its content names no holder; delete it if nobody saves there"
    who = f"process {holder.get('pid')} on {holder.get('host')}"
    what = f"{holder.get('purpose')}, since {holder.get('since')}"
    try:
        left = max(0.0, float(holder["renewed"]) + float(holder["seconds"]) - time.time())
    except (KeyError, TypeError, ValueError):
        left = 0.0
    return (
        f"{path.parent} is in use by {who} ({what}); wait until it is done, or end it: its lock "
        f"ends {left:.0f} seconds from now if it is not renewed"
    )[:1000]
