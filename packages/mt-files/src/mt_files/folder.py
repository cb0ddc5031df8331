"""Folders that appear when they are complete."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mt_files.argument import object_url
from mt_files.error import FileError
from mt_files.writing import sync


class OccupiedError(FileError):
    """There is something where a new folder is wanted."""


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, renamed to `path` at the end or removed after an error.

    The files directly in it are synced; who makes folders in it syncs their content.

    Raises:
        OccupiedError: `path` exists and is no empty folder.
        FileError: The folder can't be made.
    """
    check_free(path)
    path = path.absolute()
    temporary = path.with_name(f".{path.name[:100]}.tmp-{os.urandom(16).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    except OSError as error:
        raise FileError(path, f"cannot make it: {error.strerror or error}") from error
    try:
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        check_free(path)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(path.parent)


def check_free(path: Path) -> None:
    """Raise OccupiedError if a path exists and is no empty folder, and FileError for a URL."""
    if (url := object_url(path)) is not None:
        problem = "is in an object store, where only checkpoints of a run are written; "
        raise FileError(url, problem + "write to a local folder, and copy it")
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise OccupiedError(path, "exists; name a folder that does not, or is empty")
