"""An object store in place of a disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from mt_files import FileError, MissingFileError, ObjectStore, StoredObject

from mt_ckpt.disk import Disk, disk_errors

BLOCK_BYTES = 8 << 20


class StoreDisk(Disk):
    """The objects of a bucket as files; a path with objects below it counts as a folder.

    An object is complete or absent, and is durable after the put: nothing is synced. Nothing is
    renamed either; see `StoredStep`.

    Args:
        store: The bucket.
    """

    has_folders = False

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def exists(self, path: Path) -> bool:
        """Return whether there is an object at a path."""
        with disk_errors("look for", path):
            return self.store.head(key_of(path)) is not None

    def is_folder(self, path: Path) -> bool:
        """Return whether there is an object below a path."""
        with disk_errors("look into", path):
            return self.store.has_any(key_of(path))

    def names(self, path: Path) -> list[str]:
        """Return the names of objects and folders in a folder."""
        folders, objects = self.store.names(key_of(path))
        return [*folders, *(info.path.rpartition("/")[2] for info in objects)]

    def modified(self, path: Path) -> float:
        """Return the time at which an object was put, by the store's clock."""
        info = self.store.head(key_of(path))
        if info is None:
            raise MissingFileError(str(path), "no such object")
        return info.modified

    def open(self, folder: Path, name: str, *, parts: bool = False) -> tuple[BinaryIO, int]:
        """Open an object as a file; each read asks the store for a range."""
        key = key_of(folder / name)
        if not parts:
            first, info = self.store.start(key, BLOCK_BYTES)
            return StoredObject(store=self.store, info=info).open(BLOCK_BYTES, first), info.size
        info = self.store.head(key)
        if info is None:
            raise MissingFileError(str(folder / name), "no such object")
        return StoredObject(store=self.store, info=info).open(0), info.size

    def read(self, folder: Path, name: str, *, limit: int) -> bytes:
        """Return the content of an object of at most `limit` bytes."""
        stream, size = self.open(folder, name)
        if size > limit:
            problem = f"has {size} bytes; at most {limit} are read of such a file"
            raise FileError(str(folder / name), problem)
        with stream:
            return stream.read(size)

    def files(self, root: Path) -> tuple[dict[str, int], dict[str, str]]:
        """List every object below `root`, with its size."""
        start = len(key_of(root)) + 1
        with disk_errors("list", root):
            return {info.path[start:]: info.size for info in self.store.list(key_of(root))}, {}

    def mkdir(self, path: Path) -> None:
        """Do nothing: folders come with their objects."""

    def put(self, path: Path, blocks: Iterable[memoryview], *, size: int) -> None:
        """Put an object from its blocks, which are kept in memory for a further try."""
        content, done = bytearray(size), 0
        for block in blocks:
            content[done : done + len(block)] = block
            done += len(block)
        self.store.put(key_of(path), content)

    def fsync(self, path: Path) -> None:
        """Do nothing: objects are durable after the put."""

    def rename(self, path: Path, new: Path) -> None:
        """Refuse: a store does not rename many objects at once."""
        raise FileError(str(path), f"can't be renamed to {new} in an object store")

    def unlink(self, path: Path) -> None:
        """Delete an object."""
        self.store.delete([key_of(path)])

    def rmdir(self, path: Path) -> None:
        """Do nothing: folders go with their objects."""

    def remove_tree(self, path: Path) -> None:
        """Delete all objects below a path."""
        with disk_errors("remove", path):
            self.store.delete([info.path for info in self.store.list(key_of(path))])


def open_disk(url: str) -> StoreDisk:
    """Open the store of a URL."""
    return StoreDisk(ObjectStore(url))


def store_of(disk: Disk) -> ObjectStore:
    """Return the store of a `StoreDisk`."""
    assert isinstance(disk, StoreDisk), "the others have folders"  # noqa: S101 - our invariant
    return disk.store


def key_of(path: Path) -> str:
    """Return the path of an object in its bucket: of `s3://bucket/a/b` it is `a/b`."""
    return "/".join(path.parts[2:])
