"""Crash-safe writing: a file is either the old one, absent, or complete."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Make renames and removals inside a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_path(path: Path) -> Path:
    """A sibling name on the same file system, unique to this process."""
    return path.with_name(f"{path.name}.tmp-{os.getpid()}")


def write_atomic(path: Path, content: bytes) -> None:
    """Write a whole file under a temporary name, sync it, then rename it into place."""
    temporary = temporary_path(path)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
