"""Tar files of samples (WebDataset), indexed once: any member is one range read."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import mt_files
import numpy as np
from mt_data import DataError, DataFileError
from mt_files import FileError, object_url, parse_json
from numpy.typing import NDArray

from mt_multimodal.ranges import Ranges, open_ranges
from mt_multimodal.tar_headers import BLOCK, DIGEST, Member, read_members

_MAGIC = b"mt tar index 1\n\0"
_HEAD = struct.Struct("<I")
_MOST_INDEX = 1 << 33
_MOST_HEAD = 1 << 12
# The key of a sample is the name up to the first dot of its last part.
_NAME = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)", re.DOTALL)


@dataclass(frozen=True)
class _Arrays:
    """Columns of the members, and the ends of names and samples."""

    begins: NDArray[np.int64]
    sizes: NDArray[np.int64]
    digests: NDArray[np.uint8]
    name_ends: NDArray[np.int64]
    sample_ends: NDArray[np.int64]
    names: NDArray[np.uint8]

    def payload(self) -> bytes:
        return b"".join(np.ascontiguousarray(column).tobytes() for column in vars(self).values())


class TarIndex:
    """A tar file with access to its members by number, in any order and by several threads.

    Consecutive members with the same key form a sample: the key is the name up to the first dot of
    its last part, and the rest of the name, in lower case, is the member's kind. Members without a
    dot belong to no sample. Names are never used as paths to write to.

    The tar is read once to its end, and the index goes into a file: beside a local tar as
    `NAME.tar.index` if its folder is writable, or into `folder`. The index is used again while the
    tar keeps its size, and its first and last 64 KiB, or in a store its ETag. Each read compares a
    member with its digest.

    Args:
        path: The tar, or its URL in an object store.
        folder: Folder of the index; by default the tar's own folder. Without a folder the index of
            an object is kept in memory.

    Attributes:
        path: The tar.
        num_samples: Number of samples.

    Raises:
        DataFileError: The file is no tar, ends early, or has a member that is no regular file, goes
            beyond the end, or has the name of another member.
        FileError: The file can't be read.
    """

    def __init__(
        self, path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None
    ) -> None:
        self.path = os.fspath(path)
        self._ranges = open_ranges(path)
        self.index_path = _index_path(self.path, folder)
        found = None if self.index_path is None else _read(self.index_path, self._ranges)
        self._columns = found or _made(self._ranges)
        self.num_samples = len(self._columns.sample_ends)
        if found is None and self.index_path is not None:
            self._write(self.index_path, keep=folder is not None)

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._columns.begins)

    def name(self, member: int) -> str:
        """Return the name of a member."""
        ends = self._columns.name_ends
        begin = int(ends[member - 1]) if member else 0
        return self._columns.names[begin : int(ends[member])].tobytes().decode()

    def size(self, member: int) -> int:
        """Return the number of bytes of a member."""
        return int(self._columns.sizes[member])

    def read(self, member: int) -> bytes:
        """Return the content of a member.

        Raises:
            DataFileError: The content has changed since the tar was indexed, or can't be read.
        """
        columns = self._columns
        found = self._ranges.read(int(columns.begins[member]), int(columns.sizes[member]))
        if hashlib.sha256(found).digest()[:DIGEST] != columns.digests[member].tobytes():
            raise DataFileError(
                self.where(member),
                "has another content than when the tar was indexed: it is damaged, or was changed; "
                f"restore the tar, or remove {self.index_path}",
            )
        return found

    def where(self, member: int) -> str:
        """Return the place of a member for messages."""
        return f"{self.path}: {self.name(member)}"

    def sample(self, number: int) -> dict[str, int]:
        """Return the member of each kind, such as `jpg`, of sample `number`."""
        if not 0 <= number < self.num_samples:
            raise IndexError(f"sample {number} is not among the {self.num_samples} samples")
        ends = self._columns.sample_ends
        members = range(int(ends[number - 1]) if number else 0, int(ends[number]))
        parts = ((each, _NAME.fullmatch(self.name(each))) for each in members)
        return {match[2].lower(): each for each, match in parts if match is not None}

    def key(self, number: int) -> str:
        """Return the key of a sample."""
        members = self.sample(number)
        match = _NAME.fullmatch(self.name(next(iter(members.values()))))
        assert match is not None, "a sample has members with a key"  # noqa: S101
        return match[1]

    def find(self, name: str) -> int | None:
        """Return the member of a name, or None."""
        return self._numbers.get(name)

    def verify(self) -> None:
        """Read all members, and compare each with its digest.

        Raises:
            DataFileError: A member is damaged.
        """
        for member in range(len(self)):
            self.read(member)

    @property
    def fingerprint(self) -> str:
        """Digest of all names and contents."""
        return hashlib.sha256(self._columns.payload()).hexdigest()

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {self.name(member): member for member in range(len(self))}

    def _write(self, path: Path, *, keep: bool) -> None:
        payload = self._columns.payload()
        about = {
            "size": self._ranges.size,
            "version": self._ranges.version,
            "members": len(self),
            "samples": self.num_samples,
            "names": len(self._columns.names),
            "sha256": hashlib.sha256(payload).hexdigest(),
        }
        head = json.dumps(about).encode()
        try:
            if keep:
                path.parent.mkdir(parents=True, exist_ok=True)
            content = _MAGIC, _HEAD.pack(len(head)), head, payload
            mt_files.write_file(path, *content)
        except (FileError, OSError):
            if keep:
                raise
            # The tar's own folder may be read-only.
            self.index_path = None


def _index_path(path: str, folder: str | os.PathLike[str] | None) -> Path | None:
    if folder is not None:
        code = hashlib.sha256(path.encode()).hexdigest()[:16]
        return Path(folder) / f"{Path(path).name}.{code}.index"
    return None if object_url(path) else Path(f"{path}.index")


def _made(ranges: Ranges) -> _Arrays:
    """Index a tar."""
    members = list(read_members(ranges))
    names = [member.name.encode() for member in members]
    samples = list(_sample_ends(ranges, members))
    digests = np.frombuffer(b"".join(member.digest for member in members), np.uint8)
    return _Arrays(
        np.array([member.begin for member in members], np.int64),
        np.array([member.size for member in members], np.int64),
        digests.reshape(-1, DIGEST),
        np.cumsum([len(name) for name in names], dtype=np.int64),
        np.array(samples, np.int64),
        np.frombuffer(b"".join(names), np.uint8),
    )


def _sample_ends(ranges: Ranges, members: Iterable[Member]) -> Iterator[int]:
    """Yield the end of each sample: the number after its last member."""
    seen: set[str] = set()
    key, end = None, 0
    for number, member in enumerate(members):
        match = _NAME.fullmatch(member.name)
        if match is None:
            continue
        if match[1] != key:
            if key is not None:
                yield end
            key = match[1]
            if key in seen:
                raise DataFileError(
                    ranges.name,
                    f"byte {member.begin}: {member.name!r} belongs to a sample that other members "
                    "stand behind; write the members of a sample one behind the other",
                )
            seen.add(key)
        end = number + 1
    if key is not None:
        yield end


def _read(path: Path, ranges: Ranges) -> _Arrays | None:
    """Return the columns of an index file; None if it is missing or belongs to another tar.

    Raises:
        DataFileError: The file is damaged.
    """
    try:
        content = mt_files.read_bytes(path, limit=_MOST_INDEX)
    except FileNotFoundError:
        return None
    try:
        return _parsed(content, ranges)
    except (FileError, DataError, ValueError, KeyError, TypeError, struct.error) as error:
        text = f"is damaged ({error}); remove it, and the tar is indexed again"
        raise DataFileError(str(path), text) from None


def _parsed(content: bytes, ranges: Ranges) -> _Arrays | None:
    if content[: len(_MAGIC)] != _MAGIC:
        raise ValueError("its first bytes are not those of an index")
    (length,), at = _HEAD.unpack_from(content, len(_MAGIC)), len(_MAGIC) + _HEAD.size
    if length > _MOST_HEAD:
        raise ValueError("its head is too long")
    about = parse_json(content[at : at + length], name="head")
    payload = memoryview(content)[at + length :]
    if hashlib.sha256(payload).hexdigest() != about["sha256"]:
        raise ValueError("its checksum is wrong")
    if (about["size"], about["version"]) != (ranges.size, ranges.version):
        return None
    n, samples, names = (int(about[name]) for name in ("members", "samples", "names"))
    sizes = 8 * n, 8 * n, DIGEST * n, 8 * n, 8 * samples, names
    if min(n, samples, names) < 0 or sum(sizes) != len(payload):
        raise ValueError("its columns have another size")
    ends = np.cumsum([0, *sizes]).tolist()
    parts = [payload[a:b] for a, b in pairwise(ends)]
    numbers = [np.frombuffer(part, "<i8") for part in (*parts[:2], *parts[3:5])]
    begins, member_sizes, name_ends, sample_ends = numbers
    digests = np.frombuffer(parts[2], np.uint8).reshape(-1, DIGEST)
    found = _Arrays(
        begins, member_sizes, digests, name_ends, sample_ends, np.frombuffer(parts[5], np.uint8)
    )
    _check(found, ranges.size)
    return found


def _check(columns: _Arrays, size: int) -> None:
    begins, sizes = columns.begins, columns.sizes
    ends = begins + sizes
    fits = (begins >= BLOCK) & (sizes >= 0) & (sizes <= size) & (begins <= size) & (ends <= size)
    if not fits.all() or (begins[1:] < ends[:-1]).any():
        raise ValueError("its members lie outside the tar, or in each other")
    limits = (columns.name_ends, len(columns.names)), (columns.sample_ends, len(begins))
    for column, last in limits:
        if (np.diff(column, prepend=0) < 0).any() or (len(column) and column[-1] > last):
            raise ValueError("its columns are not in order")
