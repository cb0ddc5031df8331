"""Durable files, and errors that name them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mt_files
from mt_files import FileError

from mt_ckpt.error import CheckpointError

_THREADS = 8


@contextlib.contextmanager
def disk_errors(action: str, path: Path, *, needed: str = "") -> Iterator[None]:
    """Turn an OSError into a CheckpointError with the path and, for writes, the free space."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            if needed:
                needed = f"{needed}; {shutil.disk_usage(path.parent).free} bytes are free"
        what = f"cannot {action} {path}: {error.strerror or error}{needed}"
        if isinstance(error, FileError):
            what = str(error)
        raise CheckpointError(what, file=str(path)) from error


def create_file(path: Path, *parts: bytes | memoryview, total: int | None = None) -> None:
    """Write a new file of an uncommitted checkpoint; `sync_all` syncs many files at once.

    Args:
        path: Must not exist.
        parts: The content.
        total: Size of the whole checkpoint in bytes, for the message if the disk is full.
    """
    size = sum(len(part) for part in parts)
    needed = f" (needed {size} bytes for this file"
    needed += ")" if total is None else f" and {total} bytes for the checkpoint)"
    with disk_errors("write", path, needed=needed), path.open("xb") as file:
        for part in parts:
            file.write(part)


def sync(path: Path) -> None:
    """Fsync a file or a directory."""
    with disk_errors("sync", path):
        mt_files.sync(path)


def sync_all(paths: Iterable[Path]) -> None:
    """Fsync many files or directories.

    Threads let the file system combine many into one journal commit, which is 40 times faster on a
    busy disk than one file at a time.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(sync, paths):
            pass


def remove_tree(path: Path) -> None:
    """Remove a directory as far as possible, with its leaf folders in parallel."""
    leaves = [folder for folder, below, _ in os.walk(path) if not below]
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(lambda leaf: shutil.rmtree(leaf, ignore_errors=True), leaves):
            pass
    shutil.rmtree(path, ignore_errors=True)


def list_files(root: Path) -> tuple[dict[str, int], dict[str, str]]:
    """List every file below `root` as a relative posix path.

    Returns:
        The plain files with their sizes, and the entries that a checkpoint may not contain with the
        reason.
    """
    plain: dict[str, int] = {}
    odd: dict[str, str] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        with disk_errors("list", root / folder), os.scandir(root / folder) as entries:
            for entry in entries:
                name = f"{folder}{entry.name}"
                if entry.is_symlink():
                    odd[name] = "is a symbolic link; a checkpoint holds plain files only"
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(f"{name}/")
                elif entry.is_file(follow_symlinks=False):
                    plain[name] = entry.stat(follow_symlinks=False).st_size
                else:
                    odd[name] = "is not a plain file"
    return plain, odd
