"""Token datasets on disk: `<prefix>.bin` (all tokens) and `<prefix>.idx` (their places)."""

from __future__ import annotations

import hashlib
import operator
import os
from functools import partial

import mt_files
import numpy as np
from mt_files import find_object, local_path, object_url, shorten
from numpy.typing import NDArray

from mt_data.error import DataError, DataFileError
from mt_data.storage.index import read_index
from mt_data.storage.tokens import TokenBytes, TokenFile, TokenObject

MAX_RECORD = 1 << 20
BLOCK = 4 << 20


class IndexedDataset:
    """A reader of a Megatron `.bin/.idx` pair.

    Tokens are read with `pread` into arrays that the caller owns. So an array stays valid after the
    dataset is closed, threads and forked workers may share one dataset, and a file cut short while
    it is open raises an error, not a signal. The index is kept in memory: 12 bytes for each
    sequence and 8 for each document. An index of a million sequences or more is mapped instead, so
    that the processes of a node share it; nothing may shorten its file while it is open.

    Opening checks every structural rule of the index, its sha256 if `<prefix>.json` records one,
    and the size of `.bin`. The first process that opens a mapped index remembers its digest in
    `<prefix>.digests.json`, and others do not read it again while the file stays as it is. A
    flipped bit inside `.bin` is still a valid token, so the format cannot reveal it; `verify` reads
    the file and compares the recorded sha256.

    An open dataset is in use: `IndexedWriter` does not replace it.

    A pair in an object store is read by range, always from the version that the dataset opened: an
    object that changes meanwhile is an error. The pair's index is copied to `~/.cache/mt/objects`,
    once for each version.

    Args:
        prefix: Path without the `.bin` / `.idx` ending, or a URL such as `s3://bucket/corpus`.
        multimodal: Whether the index has a mode for each sequence (no header field says so).

    Attributes:
        lengths: Number of tokens of each sequence, [num_sequences].
        document_index: Sequence number at which each document begins, and the total,
            [num_documents + 1].
        modes: Mode of each sequence of a multimodal file, else None.

    Raises:
        DataFileError: A file is truncated, oversized or inconsistent.
        FileError: A file is missing (then also a FileNotFoundError) or not a regular file.

    Shape:
        - `dataset[i]`: [lengths[i]], the tokens of sequence i in the stored dtype.
    """

    def __init__(self, prefix: str | os.PathLike[str], *, multimodal: bool = False) -> None:
        self.prefix = check_prefix(prefix)
        self.multimodal = multimodal
        self.index_path = f"{self.prefix}.idx"
        self.token_path = f"{self.prefix}.bin"
        self._kept: tuple[object] | None = None
        self._remote = object_url(self.prefix) is not None
        if self._remote:
            index = find_object(self.index_path).cached()
            cache = index.with_name("digests.json")
        else:
            index, cache = self.index_path, f"{self.prefix}.digests.json"
        self._index = read_index(index, self.index_path, multimodal=multimodal, cache=cache)
        self._check_recorded_digest()
        self.dtype, self.num_tokens = self._index.dtype, self._index.num_tokens
        self.lengths, self.modes = self._index.lengths, self._index.modes
        self.document_index = self._index.document_index
        self._bytes: TokenBytes = (
            TokenObject(find_object(self.token_path))
            if self._remote
            else TokenFile(self.token_path)
        )
        try:
            self._check_token_file()
        except DataFileError:
            self.close()
            raise

    def _check_recorded_digest(self) -> None:
        """Compare the digest of the index, which is in memory anyway, with the recorded one."""
        recorded = (self.metadata() or {}).get("idx_sha256")
        if recorded is not None and recorded != self._index.sha256:
            raise DataFileError(
                self.index_path,
                f"content has changed: {self.prefix}.json records sha256 {recorded}, found "
                f"{self._index.sha256}; restore it, or remove the .json if another tool wrote "
                "the dataset anew",
            )

    def _check_token_file(self) -> None:
        expected = self.num_tokens * self.dtype.itemsize
        actual = self._bytes.size
        if actual != expected:
            raise DataFileError(
                self.token_path,
                f"expected {expected} bytes ({self.num_tokens} tokens of {self.dtype.name}, "
                f"from {self.index_path}), found {actual} bytes; data ends or differs at offset "
                f"{min(actual, expected)}: restore the pair or build it again",
            )

    def __reduce__(self) -> tuple[object, ...]:
        return partial(IndexedDataset, multimodal=self.multimodal), (self.prefix,)

    def __enter__(self) -> IndexedDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the token file. Arrays read before stay valid."""
        self._bytes.close()

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_index) - 1

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray:
        return self.read(index)

    def read(self, index: int, offset: int = 0, length: int | None = None) -> NDArray:
        """Return tokens [offset, offset + length) of a sequence; to its end if length is None."""
        index = _position(index, len(self), "sequence", self.index_path)
        available = int(self.lengths[index])
        length = available - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(
                f"{self.index_path}: tokens [{offset}, {offset + length}) of sequence {index} "
                f"do not exist; it has {available} tokens"
            )
        start = int(self._index.pointers[index]) // self.dtype.itemsize + offset
        return self._read_tokens(start, length)

    def document(self, index: int) -> NDArray:
        """Return all tokens of one document (its sequences are stored back to back)."""
        index = _position(index, self.num_documents, "document", self.index_path)
        first, last = (int(value) for value in self.document_index[index : index + 2])
        if first == last:
            return np.empty(0, self.dtype)
        start = int(self._index.pointers[first]) // self.dtype.itemsize
        return self._read_tokens(start, int(self.lengths[first:last].sum(dtype=np.int64)))

    def stream(self, start: int, length: int) -> NDArray:
        """Return tokens [start, start + length) of the whole file, across sequences."""
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise IndexError(
                f"{self.token_path}: tokens [{start}, {start + length}) do not exist; "
                f"the file has {self.num_tokens}"
            )
        return self._read_tokens(start, length)

    def _read_tokens(self, start: int, length: int) -> NDArray:
        if self._bytes.closed:
            raise DataError(f"{self.token_path}: the dataset is closed; open it again to read")
        tokens = np.empty(length, self.dtype)
        if length == 0:
            return tokens
        self._bytes.read_into(tokens.data.cast("B"), start * self.dtype.itemsize)
        return tokens

    @property
    def fingerprint(self) -> str:
        """Digest of the index and of the recorded digests, to detect an exchanged dataset.

        It reads no tokens; `verify` is the full check.
        """
        recorded = (self.metadata() or {}).get("bin_sha256")
        return hashlib.sha256(f"{self._index.sha256}:{recorded}".encode()).hexdigest()

    def metadata(self) -> dict[str, object] | None:
        """Return the content of `<prefix>.json`; None if another tool wrote the dataset."""
        path = f"{self.prefix}.json"
        try:
            content = self._stored_record(path) if self._remote else _record(path)
        except mt_files.FileError as error:
            raise DataFileError(path, error.problem) from None
        if content is None:
            return None
        if not isinstance(content, dict):
            raise DataFileError(path, f"expected a JSON object, found {type(content).__name__}")
        return content

    def _stored_record(self, path: str) -> object:
        """Return the record of a pair in a store, which is read once."""
        if self._kept is None:
            try:
                content = find_object(path).content(limit=MAX_RECORD)
            except FileNotFoundError:
                content = b"null"
            self._kept = (mt_files.parse_json(content, name=path),)
        return self._kept[0]

    def verify(self, *, remember: bool = False) -> None:
        """Compare both files with the digests recorded at the time of writing.

        Args:
            remember: Whether to keep the computed digests in `<prefix>.digests.json`, and to trust
                them while a file's size, inode and times of change stay the same (see
                `mt_files.sha256_file`). Then only the first verification reads the files. In a
                store `remember` reads nothing: reads are bound to a version there, and opening
                compares the digest of the index.

        Raises:
            DataFileError: A digest differs or was never recorded.
        """
        recorded = self.metadata()
        if recorded is None:
            raise DataFileError(
                f"{self.prefix}.json",
                "not found, so there is no digest to compare; only datasets written by "
                "IndexedWriter have one",
            )
        if self._remote:
            if not remember:
                self._verify_stored(recorded)
            return
        cache = f"{self.prefix}.digests.json" if remember else None
        for path, key in ((self.token_path, "bin_sha256"), (self.index_path, "idx_sha256")):
            _compare(path, recorded.get(key), mt_files.sha256_file(path, cache=cache))

    def _verify_stored(self, recorded: dict[str, object]) -> None:
        digest, size = hashlib.sha256(), self._bytes.size
        for start in range(0, size, BLOCK):
            block = memoryview(bytearray(min(BLOCK, size - start)))
            self._bytes.read_into(block, start)
            digest.update(block)
        _compare(self.token_path, recorded.get("bin_sha256"), digest.hexdigest())


def _record(path: str) -> object:
    """Return the record beside a pair on a disk; None if the pair has no record."""
    return mt_files.read_json(path, limit=MAX_RECORD) if os.path.exists(path) else None


def _compare(path: str, expected: object, actual: str) -> None:
    if expected != actual:
        raise DataFileError(
            path,
            f"content has changed: expected sha256 {shorten(expected)}, found {actual}; "
            "restore the file, or build the dataset again",
        )


def check_prefix(prefix: str | os.PathLike[str], *, writes: bool = False) -> str:
    """Return a prefix as a string, and refuse the path of one of the two files.

    Args:
        prefix: A path, or a URL of an object store.
        writes: Whether a dataset will be written, which is possible only on a disk.
    """
    text = object_url(prefix) or local_path(prefix)
    if writes and object_url(prefix) is not None:
        text = f"{text} is in an object store; write to a local disk and copy the files there, the "
        raise DataError(text + ".idx last")
    if text.endswith((".bin", ".idx")):
        raise DataError(f"{text!r} names one file of the pair; pass the prefix {text[:-4]!r}")
    if not os.path.basename(text):
        raise DataError(f"{text!r} has no file name; pass something like {text + 'corpus'!r}")
    return text


def _position(index: int, count: int, noun: str, path: str) -> int:
    index = operator.index(index)
    if not -count <= index < count:
        raise IndexError(f"{path}: {noun} {index} does not exist; there are {count}")
    return index % count
