"""Databases: the chunks of one or several datasets, with vectors and an index to search them."""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from mt_data import PADDING, DataError, DataFileError, IndexedDataset
from mt_files import Checks, shorten
from numpy.typing import NDArray

from mt_retro.approximate import FaissIndex, IndexRecord
from mt_retro.chunks import Chunks, DatasetRecord, data_digest
from mt_retro.exact import check_vectors, nearest
from mt_retro.ngrams import NGramEmbedding
from mt_retro.stored import digest_of, naming, read_record
from mt_retro.vectors import JoinedVectors, NamedEmbedding, Vectors

INDEX = "index.faiss"


@dataclass(frozen=True, kw_only=True)
class SourceRecord(DatasetRecord):
    """A dataset of a database.

    Attributes:
        vectors: Digest of the vectors of its chunks.
        vectors_path: Path of the folder of the vectors, relative to the database.
        chunks: Number of chunks.
    """

    vectors: str
    vectors_path: str
    chunks: int

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(0, "chunks")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class DatabaseRecord:
    """A description of a database.

    Attributes:
        kind: Kind of the folder.
        chunk: Number of tokens in a chunk.
        embedding: Name of the embedding.
        dim: Number of values in a vector.
        sources: The datasets, in the order of their chunks.
        index: The index of faiss; None if all vectors are compared.
    """

    kind: Literal["database"]
    chunk: int
    embedding: str
    dim: int
    sources: tuple[SourceRecord, ...]
    index: IndexRecord | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "chunk", "dim")
        if not checks.errors:
            digests = [source.data for source in self.sources]
            if len(set(digests)) < len(digests) or not digests:
                checks.add("sources", "have one dataset twice, or none")
        checks.done()


class Database:
    """The chunks of datasets, to search and to read.

    Chunks are numbered through all datasets. The tokens stay where they are; opening reads the
    indexes of the datasets and compares their digests.

    Args:
        folder: A folder that `mt-retro build` made.

    Attributes:
        record: The description in the folder.
        digest: Digest of the datasets, the vectors and the index.
        sources: The chunks of each dataset.
        vectors: The vectors of all chunks.

    Raises:
        DataError: There is no database, or it is not complete.
        DataFileError: A file is damaged, or a dataset is not the one of the database.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.record = read_record(self.folder, DatabaseRecord, "database")
        self.digest = digest_of(self.record)
        self.chunk, self.dim = self.record.chunk, self.record.dim
        self.sources = [self._chunks_of(source) for source in self.record.sources]
        self.vectors = JoinedVectors([self._vectors_of(source) for source in self.record.sources])
        self._first = self.vectors.first

    def _chunks_of(self, source: SourceRecord) -> Chunks:
        with naming(self.folder, source.data_path) as prefix:
            dataset = IndexedDataset(prefix)
        if (found := data_digest(dataset)) != source.data:
            text = f"is not the dataset of the database {self.folder}: its digest is {found[:16]}"
            text += f", and {source.data[:16]} is expected; restore it, or build the database anew"
            raise DataFileError(dataset.index_path, text)
        chunks = Chunks(dataset, self.record.chunk)
        if len(chunks) != source.chunks:
            text = f"has {len(chunks)} chunks, and the database {self.folder} says {source.chunks}"
            raise DataFileError(dataset.index_path, f"{text}; build the database anew")
        return chunks

    def _vectors_of(self, source: SourceRecord) -> Vectors:
        with naming(self.folder, source.vectors_path) as path:
            vectors = Vectors(path)
        if vectors.digest != source.vectors:
            text = f"these are not the vectors of the database {self.folder}; build it anew"
            raise DataFileError(str(vectors.folder), text)
        if (len(vectors), vectors.dim) != (source.chunks, self.dim):
            text = f"{len(vectors)} vectors of {vectors.dim} dims, where the database "
            text += f"{self.folder} has {source.chunks} of {self.dim}; build it anew"
            raise DataFileError(str(vectors.folder), text)
        return vectors

    def __len__(self) -> int:
        return self._first[-1]

    @property
    def tokenizer(self) -> str | None:
        """SHA-256 of the tokenizer of the datasets; None if none of them says it."""
        return next(filter(None, (each.tokenizer for each in self.sources)), None)

    def close(self) -> None:
        """Close the datasets."""
        for source in self.sources:
            source.dataset.close()

    def first_of(self, data: str) -> int | None:
        """Return the number of the first chunk of a dataset, given its digest; None without it."""
        digests = [source.data for source in self.record.sources]
        return self._first[digests.index(data)] if data in digests else None

    def place(self, number: int) -> tuple[int, int, int]:
        """Return a chunk's dataset, its document there, and its number in the document."""
        if not 0 <= number < len(self):
            raise IndexError(f"{self.folder}: chunk {number} does not exist; there are {len(self)}")
        source = bisect_right(self._first, number) - 1
        inside = number - self._first[source]
        document = int(self.sources[source].documents(np.array([inside]))[0])
        return source, document, inside - self.sources[source].of_document(document).start

    def tokens(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of chunks, each with the next chunk of its document.

        The places after the end of the document hold `mt_data.PADDING`. The number -1 stands for
        a missing neighbour, all of whose places hold `mt_data.PADDING`.

        Raises:
            DataError: A number is below -1, or no chunk has it.

        Shape:
            - ids: any shape; result: [*ids.shape, 2 * chunk]
        """
        return self.read(ids)[0]

    def read(
        self, ids: NDArray[np.int64], *, fill: int = PADDING
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return `tokens` with `fill` in place of padding, and the number of tokens of each.

        Shape:
            - ids: any shape; result: [*ids.shape, 2 * chunk] and [*ids.shape]
        """
        shape, numbers = np.shape(ids), np.asarray(ids, np.int64).reshape(-1)
        check_ids(numbers, len(self), str(self.folder))
        if len(self.sources) == 1 and len(self):
            tokens, lengths = self.sources[0].read_chunks(
                np.maximum(numbers, 0), continued=True, fill=fill
            )
            missing = np.flatnonzero(numbers < 0)
            tokens[missing], lengths[missing] = fill, 0
            return tokens.reshape(*shape, 2 * self.chunk), lengths.reshape(shape)
        tokens = np.full((len(numbers), 2 * self.chunk), fill, np.int64)
        lengths = np.zeros(len(numbers), np.int64)
        for source, first in zip(self.sources, self._first, strict=False):
            mine = np.flatnonzero((numbers >= first) & (numbers < first + len(source)))
            found = source.read_chunks(numbers[mine] - first, continued=True, fill=fill)
            tokens[mine], lengths[mine] = found
        return tokens.reshape(*shape, 2 * self.chunk), lengths.reshape(shape)

    def search(
        self, queries: NDArray, k: int, *, excluded: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the chunks nearest to each query vector; see `exact_neighbours`.

        An index of faiss may miss some chunks; the distances are exact.

        Raises:
            DataError: The vectors have another number of dims, or values that are not finite.
            DataFileError: A file of the database is damaged.
        """
        if queries.ndim != 2 or queries.shape[1] != self.dim:
            text = f"vectors have the shape {queries.shape}; they must be [n, {self.dim}]"
            raise DataError(f"{text} for {self.folder}, of the embedding {self.record.embedding}")
        if self._index is None:
            return nearest(queries, self.vectors.blocks, self.vectors.gather, k, excluded=excluded)
        check_vectors("queries", queries)
        if excluded is None:
            excluded = np.zeros((len(queries), 2), np.int64)
        return self._index.search(queries, self.vectors.gather, k, excluded)

    @cached_property
    def _index(self) -> FaissIndex | None:
        if self.record.index is None:
            return None
        return FaissIndex.read(self.folder / INDEX, self.record.index, (len(self), self.dim))

    @cached_property
    def embedding(self) -> NamedEmbedding:
        """The built-in embedding, if the database was made with it.

        Raises:
            DataError: The vectors came from elsewhere.
        """
        known = NGramEmbedding(self.dim)
        if known.name != self.record.embedding:
            raise DataError(
                f"{self.folder} was made with the embedding {shorten(self.record.embedding)}; give "
                "vectors of the same (mt-retro query --embeddings FOLDER, or mt-infer generate "
                "--embedder DIR)"
            )
        return known

    def verify(self) -> None:
        """Read every byte of the database and its datasets, and compare the digests.

        Datasets without recorded digests are not read again; opening compares their digest.

        Raises:
            DataFileError: A file is damaged; the message names it.
        """
        for source, vectors in zip(self.sources, self.vectors.parts, strict=True):
            if source.dataset.metadata() is not None:
                source.dataset.verify()
            vectors.verify()
        _ = self._index


def check_ids(ids: NDArray[np.int64], count: int, name: str) -> None:
    """Check that the numbered chunks exist; -1 is a missing neighbour.

    Raises:
        DataFileError: A number is below -1, or at or above `count`.
    """
    if ids.size and not -1 <= ids.min() <= ids.max() < count:
        wrong = int(ids.min() if ids.min() < -1 else ids.max())
        raise DataFileError(
            name, f"chunk {wrong} does not exist; there are {count}, and -1 is none"
        )
