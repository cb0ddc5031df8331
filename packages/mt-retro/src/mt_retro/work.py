"""Work on the rows of an array, block by block: in parts, by several processes, after a kill."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mt_data import DataError, Part
from mt_files import (
    FileError,
    Progress,
    read_bytes,
    remove_temporaries,
    to_plain,
    write_file,
    writing,
)
from numpy.typing import NDArray

from mt_retro.stored import (
    PLAN,
    RECORD,
    ArrayRecord,
    ArrayWriter,
    digest_of,
    read_sealed,
    write_record,
)

_BLOCKS = "blocks"
_DIGEST = 32

Make = Callable[[int, int], NDArray]


@dataclass(frozen=True, kw_only=True)
class Work:
    """An array whose rows are made in blocks, then joined.

    An unfinished folder has `plan.json`, and a file in `blocks` for each finished block; a complete
    one has the array and `record.json`, which is written last. The blocks follow from the number of
    rows alone, so any number of processes may share them, on machines that share the file system,
    and any process may be killed: the same command makes the missing blocks. The process that
    makes the last block joins them.

    Args:
        folder: The folder.
        name: Name of the array's file.
        plan: Plain values that decide all rows. A folder with another plan is refused.
        shape: Number of rows, and number of values in a row.
        dtype: Name of the dtype.
    """

    folder: Path
    name: str
    plan: dict[str, object]
    shape: tuple[int, int]
    dtype: str

    def run(
        self,
        make: Make,
        record_of: Callable[[ArrayRecord], object],
        *,
        part: Part | None = None,
        progress: Progress | None = None,
    ) -> bool:
        """Make the blocks of a part, then join all of them if none is missing.

        Args:
            make: Function that returns the rows [start, stop).
            record_of: Function that returns the folder's record, given the record of the array.
            part: Share of the blocks to make; by default all of them.
            progress: Where to show the progress.

        Returns:
            Whether the folder is complete.

        Raises:
            DataError: The folder holds something else.
        """
        if self._is_complete():
            remove_temporaries(self.folder)
            return True
        (self.folder / _BLOCKS).mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, self.folder / _BLOCKS):
            remove_temporaries(folder)
        write_record(self.folder / PLAN, self.plan)
        mine = self._share(Part(number=1, count=1) if part is None else part)
        for done, number in enumerate(mine):
            if self._read(number) is None and not self._is_complete():
                rows = make(number * self.block, min((number + 1) * self.block, self.shape[0]))
                self._write(number, rows)
            if progress is not None:
                progress.update(self.name, done + 1, len(mine), unit="blocks")
        with alone(self.folder):
            return self._is_complete() or self._join(record_of)

    @property
    def block(self) -> int:
        """Number of rows in a block: a large array has at least 64 blocks."""
        return min(max(-(-self.shape[0] // 64), 64), 4096)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return -(-self.shape[0] // self.block)

    def missing(self) -> int:
        """Return the number of missing blocks."""
        return sum(not self._path(number).exists() for number in range(self.num_blocks))

    def _share(self, part: Part) -> range:
        ends = [self.num_blocks * end // part.count for end in (part.number - 1, part.number)]
        return range(*ends)

    def _is_complete(self) -> bool:
        """Return whether the array is complete; refuse a folder with another plan, or other files.

        Other processes may begin or complete the folder meanwhile. The plan is removed after the
        record is written, so the plan is looked for first.
        """
        is_begun, is_complete = self._has(PLAN), self._has(RECORD)
        if is_complete and (is_begun or (self.folder / _BLOCKS).exists()):
            tidy(self.folder)  # its process was killed just before, or another made a block again
        if not (is_begun or is_complete):
            check_empty(self.folder, {_BLOCKS, PLAN})
        return is_complete

    def _has(self, name: str) -> bool:
        """Return whether the folder has a file with this plan; refuse a file with another plan."""
        content = read_sealed(self.folder / name)
        if content is None:
            return False
        wanted = json.loads(json.dumps(to_plain(self.plan)))
        found: dict[str, object] = {key: content.get(key) for key in wanted}
        if digest_of(found) != digest_of(wanted):
            raise DataError(f"{self.folder} {_difference(found, wanted)}")
        return True

    def _path(self, number: int) -> Path:
        return self.folder / _BLOCKS / f"{number:08d}"

    def _seal(self, number: int, content: bytes) -> bytes:
        key = f"{digest_of(self.plan)}:{self.shape}:{self.block}:{number}:".encode()
        return hashlib.sha256(key + content).digest()

    def _rows(self, number: int) -> int:
        return min(self.block, self.shape[0] - number * self.block)

    def _write(self, number: int, rows: NDArray) -> None:
        expected = (self._rows(number), self.shape[1])
        if rows.shape != expected:
            raise DataError(f"made rows of the shape {rows.shape}; they must have {expected}")
        content = np.ascontiguousarray(rows, np.dtype(self.dtype).newbyteorder("<")).tobytes()
        self._path(number).parent.mkdir(exist_ok=True)  # unless the folder was completed just now
        write_file(self._path(number), content, self._seal(number, content))

    def _read(self, number: int) -> bytes | None:
        """Return the bytes of a block; None if it does not exist, or is not of this plan."""
        size = self._rows(number) * self.shape[1] * np.dtype(self.dtype).itemsize
        try:
            found = read_bytes(self._path(number), limit=size + _DIGEST, within=self.folder)
        except FileError:
            return None
        content, seal = found[:size], found[size:]
        return content if seal == self._seal(number, content) else None

    def _join(self, record_of: Callable[[ArrayRecord], object]) -> bool:
        if self.missing():
            return False
        with writing(self.folder / self.name) as file:
            writer = ArrayWriter(file, self.dtype, self.shape)
            for number in range(self.num_blocks):
                content = self._read(number)
                if content is None:
                    self._path(number).unlink()
                    raise DataError(
                        f"{self._path(number)} was damaged, and is removed; give the same command "
                        "again, and it is made anew"
                    )
                writer.write(content)
            record = writer.end()
        write_record(self.folder / RECORD, record_of(record))
        tidy(self.folder)
        return True


def check_empty(folder: Path, known: Collection[str] = ()) -> None:
    """Check that a path is free, or a folder with only known files.

    Raises:
        DataError: The path is not a folder, or the folder has another file.
    """
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is no folder; name a new one")
    if not folder.is_dir():
        return
    for name in sorted(os.listdir(folder)):
        if name not in known and not name.startswith("."):  # a file of a killed writer
            raise DataError(f"{folder} holds something else, such as {name}; name a new folder")


def tidy(folder: Path) -> None:
    """Remove the plan, the blocks and the temporary files of a complete folder."""
    shutil.rmtree(folder / _BLOCKS, ignore_errors=True)
    remove_temporaries(folder)  # also of a process that was killed as it joined blocks
    (folder / PLAN).unlink(missing_ok=True)  # last, since it shows that files may be left


def _difference(found: dict[str, object], wanted: dict[str, object]) -> str:
    differing = [key for key in wanted if found[key] != wanted[key] and not key.endswith("_path")]
    key = differing[0]
    return (
        f"was begun with {key} {found[key]}, and this command has {wanted[key]}; name a new "
        "folder, or remove that one"
    )


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process joins the blocks of a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # no locks on this file system
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
