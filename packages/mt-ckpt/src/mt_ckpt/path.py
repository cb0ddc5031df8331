"""Paths of checkpoints: local ones, and those in object stores."""

from __future__ import annotations

import sys
from pathlib import Path, PosixPath
from typing import Any, Self

from mt_files import FileError, object_url

from mt_ckpt.disk import Disk


class StoredPath(PosixPath):
    """A path in an object store, such as `s3://bucket/run/checkpoints`.

    It carries the open store, and can't be passed to the operating system: code that does not know
    stores raises an error instead of using a local file.

    Attributes:
        disk: The store.
    """

    disk: Disk

    @classmethod
    def on(cls, disk: Disk, *parts: str | Path) -> Self:
        """Return a path in a store."""
        path = cls(*parts)
        path.disk = disk
        return path

    def with_segments(self, *segments: Any) -> Self:
        """Return a path in the same store; pathlib makes all derived paths with this method."""
        return self.on(self.disk, *segments)

    if sys.version_info < (3, 12):  # pathlib asks `with_segments` from then on

        def __truediv__(self, key: Any) -> Self:
            return self.with_segments(super().__truediv__(key))

        @property
        def parent(self) -> Self:
            """The path without its last part."""
            return self.with_segments(super().parent)

    def __str__(self) -> str:
        text = super().__str__()  # with one slash after the scheme
        return object_url(text) or text

    def __fspath__(self) -> str:
        problem = "is in an object store, and this needs a local folder; copy it to one first"
        raise FileError(str(self), problem)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return as_path, (str(self),)


def as_path(path: str | Path) -> Path:
    """Return a path as a `Path`; for a URL of an object store it is a `StoredPath`.

    Raises:
        FileError: The store can't be opened.
        MissingExtraError: obstore is not installed.
    """
    if isinstance(path, StoredPath):
        return path
    if (url := object_url(path)) is None:
        return Path(path)
    from mt_ckpt.objects.disk import open_disk

    return StoredPath.on(open_disk(url), url)


def disk_of(path: Path) -> Disk:
    """Return the disk, or the store, of a path."""
    return path.disk if isinstance(path, StoredPath) else Disk()
