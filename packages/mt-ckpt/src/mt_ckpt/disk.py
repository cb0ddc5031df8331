"""The disk under checkpoints: reading, durable files, and errors that name them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

import mt_files
from mt_files import FileError

from mt_ckpt.error import CheckpointError

T = TypeVar("T")
R = TypeVar("R")


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


class Disk:
    """The system calls through which checkpoints are read and changed.

    A save creates, writes, syncs, renames and removes everything through one object of this class,
    so that a test can fail, interrupt or record any of the calls. Readers get their object from
    `disk_of`.

    Attributes:
        threads: Number of threads that sync or remove many files at once.
        has_folders: Whether a file needs an existing folder.
    """

    threads = 8
    has_folders = True

    def exists(self, path: Path) -> bool:
        """Return whether there is a file or a folder at a path."""
        return path.exists()

    def is_folder(self, path: Path) -> bool:
        """Return whether there is a folder at a path."""
        return path.is_dir()

    def names(self, path: Path) -> list[str]:
        """Return the names in a folder."""
        return os.listdir(path)

    def modified(self, path: Path) -> float:
        """Return the time of a file's last change, in seconds since the epoch."""
        return path.stat().st_mtime

    def open(self, folder: Path, name: str, *, parts: bool = False) -> tuple[BinaryIO, int]:
        """Open a file for reading, and return it with its size in bytes.

        Args:
            folder: Folder that links must not leave.
            name: Path of the file in the folder.
            parts: Whether the reader reads parts of the file instead of all from start to end.
        """
        del parts  # nothing is read ahead
        stream = mt_files.open_file(f"{folder}/{name}", within=folder)
        return stream, os.fstat(stream.fileno()).st_size

    def read(self, folder: Path, name: str, *, limit: int) -> bytes:
        """Return the content of a file in a folder, of at most `limit` bytes."""
        return mt_files.read_bytes(f"{folder}/{name}", limit=limit, within=folder)

    def files(self, root: Path) -> tuple[dict[str, int], dict[str, str]]:
        """List every file below `root` as a relative posix path.

        Returns:
            The plain files with their sizes, and the entries that a checkpoint may not contain,
            with the reasons.
        """
        return _list_files(root)

    def mkdir(self, path: Path) -> None:
        """Create a folder, whose parent exists."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Create a file that does not exist, and return its descriptor, open for writing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write a part of `data`, and return its size."""
        return os.write(descriptor, data)

    def begin_sync(self, descriptor: int) -> None:
        """Begin to move a file to the disk, without a wait; `fsync` then has less to wait for."""
        if hasattr(os, "posix_fadvise"):
            # Linux starts the write-back of the dirty pages, which stay in memory meanwhile.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def put(self, path: Path, blocks: Iterable[memoryview], *, size: int) -> None:
        """Write a new file from blocks of `size` bytes in all."""
        del size
        descriptor = self.create(path)
        try:
            for block in blocks:
                rest = block
                while rest:  # the system may write less than asked
                    rest = rest[self.write(descriptor, rest) :]
            self.begin_sync(descriptor)
        finally:
            self.close(descriptor)

    def fsync(self, path: Path) -> None:
        """Wait until a file, or the names in a folder, are on the disk."""
        mt_files.sync(path)

    def rename(self, path: Path, new: Path) -> None:
        """Rename a file or a folder; a file at `new` is replaced."""
        path.replace(new)

    def unlink(self, path: Path) -> None:
        """Remove a file or a link."""
        path.unlink()

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def remove_tree(self, path: Path) -> None:
        """Remove a folder as far as possible, with the files of many folders in parallel."""
        found = [(Path(folder), below, files) for folder, below, files in os.walk(path)]

        def remove_files(entry: tuple[Path, list[str], list[str]]) -> None:
            folder, below, files = entry
            links = [name for name in below if (folder / name).is_symlink()]
            for name in (*files, *links):
                with contextlib.suppress(OSError):
                    self.unlink(folder / name)

        for _ in in_threads(remove_files, found, threads=self.threads):
            pass
        for folder, _, _ in reversed(found):
            with contextlib.suppress(OSError):
                self.rmdir(folder)


def create_file(disk: Disk, path: Path, content: bytes, *, total: int | None = None) -> None:
    """Write a new file of an uncommitted checkpoint; `sync_all` syncs many files at once.

    Args:
        disk: The disk.
        path: Must not exist.
        content: The content.
        total: Size of the whole checkpoint in bytes, for the message if the disk is full.
    """
    write_blocks(disk, path, [memoryview(content)], size=len(content), total=total)


def create_all(disk: Disk, contents: Mapping[Path, bytes]) -> None:
    """Write many small files at once; see `create_file`."""

    def write(path: Path) -> None:
        create_file(disk, path, contents[path])

    for _ in in_threads(write, contents, threads=2 * disk.threads):
        pass


def write_blocks(
    disk: Disk, path: Path, blocks: Iterable[memoryview], *, size: int, total: int | None
) -> None:
    """Write a new file as `create_file` does, from blocks of `size` bytes in all."""
    needed = f" (needed {size} bytes for this file"
    needed += ")" if total is None else f" and {total} bytes for the checkpoint)"
    with disk_errors("write", path, needed=needed):
        disk.put(path, blocks, size=size)


def make_folders(disk: Disk, path: Path) -> None:
    """Create a folder and its missing parents durably."""
    if not disk.has_folders:
        return
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        with disk_errors("create", folder), contextlib.suppress(FileExistsError):
            disk.mkdir(folder)
        sync(disk, folder.parent)
    if not path.is_dir():
        with disk_errors("create", path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def sync(disk: Disk, path: Path) -> None:
    """Fsync a file or a directory."""
    with disk_errors("sync", path):
        disk.fsync(path)


def sync_all(disk: Disk, paths: Iterable[Path]) -> None:
    """Fsync many files or directories.

    Threads let the file system combine many into one journal commit, which is 40 times faster on a
    busy disk than one file at a time.
    """
    for _ in in_threads(lambda path: sync(disk, path), paths, threads=disk.threads):
        pass


def in_threads(action: Callable[[T], R], items: Iterable[T], *, threads: int) -> Iterator[R]:
    """Yield the result of `action` for each item, in order.

    Items are taken as threads become free, so that few of them are in memory. The first error ends
    the work: items that no thread has begun are dropped.

    Args:
        action: Function that a thread calls with each item.
        items: The items.
        threads: Number of threads; twice as many items are taken and not yet yielded. 1 means
            the caller's own.
    """
    if threads == 1:
        yield from map(action, items)
        return
    pending: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            if len(pending) >= 2 * threads:
                yield pending.popleft().result()
            pending.append(pool.submit(action, item))
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _list_files(root: Path) -> tuple[dict[str, int], dict[str, str]]:
    plain: dict[str, int] = {}
    odd: dict[str, str] = {}
    top, folders = str(root), [""]
    while folders:
        folder = folders.pop()
        with disk_errors("list", root / folder), os.scandir(f"{top}/{folder}") as entries:
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
