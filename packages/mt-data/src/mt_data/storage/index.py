r"""The `.idx` file of a Megatron token dataset: its layout, and all checks of it.

Little-endian layout, with S sequences and D = documents + 1:

| offset | size | content |
|---|---|---|
| 0 | 9 | `MMIDIDX\0\0` |
| 9 | 8 | uint64 version, 1 |
| 17 | 1 | uint8 token dtype code |
| 18 | 8 | uint64 S |
| 26 | 8 | uint64 D |
| 34 | 4 S | int32 sequence lengths in tokens |
| 34 + 4 S | 8 S | int64 byte offset of each sequence in the `.bin` file |
| 34 + 12 S | 8 D | int64 document index: 0, then the sequence count after each document |
| 34 + 12 S + 8 D | S | int8 modes, in multimodal files only; no header field says so |
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import IO

import mt_files
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mt_data.error import DataError, DataFileError, at_least

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_BY_CODE: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODE_BY_DTYPE = {dtype: code for code, dtype in DTYPE_BY_CODE.items()}
UINT16_VOCABULARY_LIMIT = 65_500
MAPPED_FROM = 1_000_000
"""Number of sequences from which an index is mapped."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Return a token dtype for a vocabulary: uint16 below 65,500 ids, else int32."""
    at_least(1, vocab_size=vocab_size)
    return np.dtype("<u2") if vocab_size < UINT16_VOCABULARY_LIMIT else np.dtype("<i4")


def storable_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the little-endian dtype that the format stores, or raise with the choices."""
    wanted = np.dtype(dtype).newbyteorder("<")
    if wanted not in CODE_BY_DTYPE:
        names = ", ".join(known.name for known in DTYPE_BY_CODE.values())
        raise DataError(f"dtype {np.dtype(dtype).name} cannot be stored; choose one of {names}")
    return wanted


@dataclass(frozen=True, kw_only=True, eq=False)
class Index:
    """The content of an `.idx` file.

    Attributes:
        digest: The sha256 of the file's bytes, if it is known.

    Shape:
        - lengths: [S] int32; pointers: [S] int64 bytes; document_index: [D] int64
        - modes: [S] int8, or None if the file is not multimodal
    """

    dtype: np.dtype
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    document_index: NDArray[np.int64]
    modes: NDArray[np.int8] | None = None
    digest: str | None = None

    @classmethod
    def build(
        cls,
        dtype: DTypeLike,
        lengths: NDArray[np.int32],
        document_index: NDArray[np.int64],
        modes: NDArray[np.int8] | None = None,
    ) -> Index:
        """Compute the byte pointers of sequences stored back to back."""
        dtype = storable_dtype(dtype)
        return cls(
            dtype=dtype,
            lengths=lengths,
            pointers=_byte_offsets(lengths, dtype.itemsize),
            document_index=document_index,
            modes=modes,
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the `.bin` file."""
        if not len(self.lengths):
            return 0
        return int(self.pointers[-1]) // self.dtype.itemsize + int(self.lengths[-1])

    def _parts(self) -> Iterator[bytes | memoryview]:
        yield HEADER.pack(
            MAGIC,
            VERSION,
            CODE_BY_DTYPE[self.dtype],
            len(self.lengths),
            len(self.document_index),
        )
        yield self.lengths.astype("<i4", copy=False).data
        yield self.pointers.astype("<i8", copy=False).data
        yield self.document_index.astype("<i8", copy=False).data
        if self.modes is not None:
            yield self.modes.astype("i1", copy=False).data

    def to_bytes(self) -> bytes:
        """Return the file's bytes."""
        return b"".join(self._parts())

    @cached_property
    def sha256(self) -> str:
        """Digest of the file's bytes."""
        if self.digest is not None:
            return self.digest
        digest = hashlib.sha256()
        for part in self._parts():
            digest.update(part)
        return digest.hexdigest()


def read_index(
    file_path: str | Path,
    path: str | None = None,
    *,
    multimodal: bool = False,
    cache: str | Path | None = None,
) -> Index:
    """Read and check an `.idx` file.

    Every number in the file is checked against the size of the file before it is used for an
    allocation. A file of `MAPPED_FROM` sequences or more is mapped, so that the processes of a node
    have it in memory once, and its content is not checked again while `cache` remembers its digest.

    Args:
        file_path: The file.
        path: Name of the file in messages, if the file is a copy.
        multimodal: Whether the file has modes.
        cache: File that remembers digests of files; see `mt_files.sha256_file`.

    Raises:
        DataFileError: Names the file, the offset, the expected and the actual value.
        FileError: The file can't be read.
    """
    path = str(file_path) if path is None else path
    with mt_files.open_file(file_path) as file:
        size = os.fstat(file.fileno()).st_size
        dtype, sequences, boundaries = _read_header(path, file, size)
        _check_size(path, size, sequences, boundaries, multimodal=multimodal)
        take = _from_map(file) if sequences >= MAPPED_FROM else partial(_read_array, path, file)
        index = Index(
            dtype=dtype,
            lengths=take("<i4", sequences),
            pointers=take("<i8", sequences),
            document_index=take("<i8", boundaries),
            modes=take("i1", sequences) if multimodal else None,
        )
        if sequences < MAPPED_FROM:
            _check_content(path, index)
            return index
        digest = mt_files.known_sha256(file, file_path, cache=cache)
        if digest is None:
            _check_content(path, index)
            mt_files.sha256_file(file_path, cache=cache)
            digest = mt_files.known_sha256(file, file_path, cache=cache)  # None if it was replaced
    return replace(index, digest=digest)


def _byte_offsets(lengths: NDArray[np.int32], itemsize: int) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    offsets *= itemsize
    return offsets


def _read_header(path: str, file: IO[bytes], size: int) -> tuple[np.dtype, int, int]:
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise DataFileError(
            path, f"has {size} bytes; the header at offset 0 alone is {HEADER.size} bytes"
        )
    magic, version, code, sequences, boundaries = HEADER.unpack(header)
    if magic != MAGIC:
        raise DataFileError(
            path, f"offset 0: expected the magic bytes {MAGIC!r}, found {magic!r}: not an .idx file"
        )
    if version != VERSION:
        raise DataFileError(path, f"offset 9: expected version {VERSION}, found {version}")
    if code not in DTYPE_BY_CODE:
        raise DataFileError(path, f"offset 17: expected a token dtype code of 1 to 8, found {code}")
    if boundaries < 1:
        raise DataFileError(
            path, "offset 26: the document index needs at least 1 entry, found a count of 0"
        )
    return DTYPE_BY_CODE[code], sequences, boundaries


def _check_size(path: str, size: int, sequences: int, boundaries: int, *, multimodal: bool) -> None:
    plain = HEADER.size + 12 * sequences + 8 * boundaries
    expected = plain + (sequences if multimodal else 0)
    if size == expected:
        return
    hint = ""
    if not multimodal and sequences and size == plain + sequences:
        hint = "; a multimodal file has exactly this size: open it with multimodal=True"
    elif multimodal and size == plain:
        hint = "; a file without modes has exactly this size: open it with multimodal=False"
    raise DataFileError(
        path,
        f"expected {expected} bytes for {sequences} sequences and {boundaries} document "
        f"boundaries (offsets 18 and 26), found {size} bytes{hint}",
    )


def _read_array(path: str, file: IO[bytes], dtype: str, count: int) -> NDArray:
    offset = file.tell()
    array = np.fromfile(file, dtype=dtype, count=count)
    if len(array) != count:
        raise DataFileError(
            path, f"offset {offset}: expected {count} entries of {dtype}, read {len(array)}"
        )
    return array


def _from_map(file: IO[bytes]) -> Callable[[str, int], NDArray]:
    """Return a function that takes one array after the other from a map of the file."""
    content, place = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), file.tell()

    def take(dtype: str, count: int) -> NDArray:
        nonlocal place
        array = np.frombuffer(content, dtype, count, place)
        place += array.nbytes
        return array

    return take


def _check_content(path: str, index: Index) -> None:
    lengths, pointers, documents = index.lengths, index.pointers, index.document_index
    begins = _byte_offsets(lengths, index.dtype.itemsize)
    before, after, last = documents[:-1], documents[1:], documents[-1:]
    start = HEADER.size + 12 * len(lengths)
    rules = (
        ("a length of 0 or more for sequence {at}", lengths < 0, lengths, lengths, HEADER.size),
        (
            "byte pointer {right} for sequence {at}",
            pointers != begins,
            pointers,
            begins,
            HEADER.size + 4 * len(lengths),
        ),
        ("the document index to begin with 0", documents[:1] != 0, documents, documents, start),
        ("a document boundary of at least {right}", after < before, after, before, start + 8),
        (
            "the last document boundary to be the sequence count {right}",
            last != len(lengths),
            last,
            [len(lengths)],
            start + 8 * len(before),
        ),
    )
    for text, wrong, found, expected, offset in rules:
        if wrong.any():
            at = int(wrong.argmax())
            raise DataFileError(
                path,
                f"offset {offset + found.itemsize * at}: expected "
                f"{text.format(at=at, right=expected[at])}, found {found[at]}",
            )
