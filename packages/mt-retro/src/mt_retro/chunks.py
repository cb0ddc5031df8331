"""The chunks of a token dataset: which tokens a chunk has follows from the dataset's index."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mt_data import PADDING, DataError, DataFileError, IndexedDataset
from mt_files import Checks, object_url, open_file, sha256_file, shorten
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from mt_retro.stored import ArrayRecord, path_from


@dataclass(frozen=True, kw_only=True)
class DatasetRecord:
    """The dataset that a record describes.

    Attributes:
        data: Digest of the dataset.
        data_path: Path of the dataset, relative to the folder of the record.
    """

    data: str
    data_path: str


@dataclass(frozen=True, kw_only=True)
class ChunksRecord(DatasetRecord):
    """A folder's description of its array, which has a row for each chunk of a dataset.

    Attributes:
        chunk: Number of tokens in a chunk.
    """

    chunk: int

    def _checks(self, name: str, array: ArrayRecord, dtype: str) -> Checks:
        checks = Checks(self)
        checks.at_least(1, "chunk")
        if not checks.errors and array.dtype != dtype:
            checks.add(name, f"are of {array.dtype}; they must be {dtype}")
        return checks


class Chunks:
    """The documents of a dataset, each cut into chunks from its first token on.

    Chunk u of a document has its tokens [u * size, (u + 1) * size), and the last chunk has the
    rest. A document without tokens has no chunk. Chunks are numbered through all documents; nothing
    is stored.

    Args:
        dataset: The tokens.
        size: Number of tokens in a chunk.

    Raises:
        DataError: The size is below 1, or the dataset does not hold token ids.
    """

    def __init__(self, dataset: IndexedDataset, size: int = 64) -> None:
        if size < 1:
            raise DataError(f"a chunk of {size} tokens is too small; use 1 or more")
        if dataset.dtype.kind not in "iu":
            raise DataError(f"{dataset.prefix} holds {dataset.dtype.name}, which are no token ids")
        self.dataset, self.size = dataset, size
        self._views: dict[int, NDArray | None] = {}
        ends = np.zeros(len(dataset.lengths) + 1, np.int64)
        np.cumsum(dataset.lengths, out=ends[1:])
        self._begins = ends[dataset.document_index]
        self._first = np.zeros_like(self._begins)
        np.cumsum(-(-np.diff(self._begins) // size), out=self._first[1:])

    def __len__(self) -> int:
        return int(self._first[-1])

    @property
    def num_documents(self) -> int:
        """Number of documents, with or without chunks."""
        return len(self._first) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each document."""
        return np.diff(self._begins)

    @property
    def tokenizer(self) -> str | None:
        """SHA-256 of the tokenizer of the tokens; None if nothing beside them says it."""
        found = (self.dataset.metadata() or {}).get("tokenizer_sha256")
        return None if found is None else str(found)

    def read(self, document: int, start: int, length: int) -> NDArray:
        """Return tokens [start, start + length) of a document."""
        begin, end = self._begins[document : document + 2].tolist()
        if not 0 <= start <= start + length <= end - begin:
            text = f"tokens [{start}, {start + length}) of document {document} do not exist"
            raise IndexError(f"{self.dataset.prefix}: {text}; it has {end - begin}")
        return self.dataset.stream(begin + start, length)

    def of_document(self, document: int) -> range:
        """Return the numbers of a document's chunks."""
        if not 0 <= document < self.num_documents:
            text = f"document {document} does not exist; there are {self.num_documents}"
            raise IndexError(f"{self.dataset.prefix}: {text}")
        return range(int(self._first[document]), int(self._first[document + 1]))

    def documents(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the document of each chunk."""
        self._check(numbers)
        return np.searchsorted(self._first, numbers, side="right") - 1

    def neighbourhoods(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first chunk of each chunk's document, and the first chunk after the document.

        Shape:
            - numbers: [n]; result: [n, 2]
        """
        documents = self.documents(numbers)
        return np.stack([self._first[documents], self._first[documents + 1]], axis=1)

    def tokens(self, numbers: NDArray[np.int64], *, continued: bool = False) -> NDArray[np.int64]:
        """Return the tokens of chunks, with `mt_data.PADDING` after the end of a document.

        Args:
            numbers: Numbers of chunks.
            continued: Whether to read the next `size` tokens of the document too.

        Raises:
            IndexError: There is no such chunk.

        Shape:
            - numbers: [n]; result: [n, size], or [n, 2 * size] if `continued`
        """
        return self.read_chunks(numbers, continued=continued)[0]

    def read_chunks(
        self, numbers: NDArray[np.int64], *, continued: bool, fill: int = PADDING
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens of chunks, filled with `fill`, and the number of tokens of each chunk.

        Shape:
            - result: [n, size] or [n, 2 * size], and [n]
        """
        documents = self.documents(numbers)
        width = 2 * self.size if continued else self.size
        starts = self._begins[documents] + (numbers - self._first[documents]) * self.size
        lengths = np.minimum(self._begins[documents + 1] - starts, width)
        if not continued and (starts[1:] == starts[:-1] + lengths[:-1]).all():
            tokens = np.full((len(numbers), width), fill, np.int64)
            is_token = np.arange(width) < lengths[:, None]
            tokens[is_token] = self.dataset.stream(int(starts[0]), int(lengths.sum()))
            return tokens, lengths
        runs = self._runs(width)
        if runs is None:
            tokens = np.full((len(numbers), width), fill, np.int64)
            rest: NDArray[np.intp] | range = range(len(numbers))
        else:
            first = np.minimum(starts, len(runs) - 1)
            tokens = runs[first].astype(np.int64)
            short = np.flatnonzero(lengths < width)
            is_token = np.arange(width) < lengths[short, None]
            tokens[short] = np.where(is_token, tokens[short], fill)
            rest = np.flatnonzero(first < starts)  # chunks among the last tokens of the file
        for row in rest:
            text = self.dataset.stream(int(starts[row]), int(lengths[row]))
            tokens[row, : len(text)], tokens[row, len(text) :] = text, fill
        return tokens, lengths

    def _runs(self, width: int) -> NDArray | None:
        """Return each run of `width` tokens of a local file as a row, [n, width], without a copy.

        The file is mapped; nothing may shorten it while it is open.
        """
        dataset = self.dataset
        if width not in self._views:
            is_whole = object_url(dataset.prefix) is None and dataset.num_tokens >= width
            self._views[width] = self._mapped_runs(width) if is_whole else None
        return self._views[width]

    def _mapped_runs(self, width: int) -> NDArray:
        with open_file(self.dataset.token_path) as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        tokens = np.frombuffer(content, self.dataset.dtype, self.dataset.num_tokens)
        return sliding_window_view(tokens, width)

    def plan(self, kind: str, folder: Path) -> dict[str, object]:
        """Return the plain values of a `ChunksRecord` of these chunks, for a folder."""
        return {
            "kind": kind,
            "chunk": self.size,
            "data": data_digest(self.dataset),
            "data_path": path_from(folder, self.dataset.prefix),
        }

    def _check(self, numbers: NDArray[np.int64]) -> None:
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self):
            wrong = next(number for number in numbers.tolist() if not 0 <= number < len(self))
            raise IndexError(
                f"{self.dataset.prefix}: chunk {wrong} does not exist; there are {len(self)}"
            )


def data_digest(dataset: IndexedDataset) -> str:
    """Return a digest of a dataset's content.

    If a dataset of another tool has no recorded digests, its tokens are read once, and their
    digest is kept beside them while the file does not change.

    Raises:
        DataFileError: A dataset without recorded digests is in an object store.
    """
    if (dataset.metadata() or {}).get("bin_sha256") is not None:
        return dataset.fingerprint
    if object_url(dataset.prefix) is not None:
        raise DataFileError(
            f"{dataset.prefix}.json",
            "not found, so nothing tells whether the tokens change; write the dataset anew with "
            "mt-data merge, and copy it there with its .json",
        )
    tokens = sha256_file(dataset.token_path, cache=f"{dataset.prefix}.digests.json")
    return hashlib.sha256(f"{dataset.fingerprint}:{tokens}".encode()).hexdigest()


def check_tokenizers(sources: Iterable[Chunks]) -> None:
    """Refuse datasets that say that they are of different tokenizers.

    Raises:
        DataError: Two of them do.
    """
    said = [(each.dataset.prefix, known) for each in sources if (known := each.tokenizer)]
    for prefix, found in said[1:]:
        first, expected = said[0]
        if found != expected:
            digests = " and ".join(f"{shorten(each[:12])}..." for each in (found, expected))
            raise DataError(
                f"{prefix} and {first} are of different tokenizers (sha256 {digests}), so their "
                "ids mean other texts; write both by mt-data build with one --tokenizer"
            )
