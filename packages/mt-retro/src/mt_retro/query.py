"""The query: the neighbours of every chunk of a dataset, found once and stored."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from mt_data import DataError, DataFileError, IndexedDataset, Part
from mt_files import Progress
from numpy.typing import NDArray

from mt_retro.chunks import Chunks, ChunksRecord, check_tokenizers, data_digest
from mt_retro.database import Database, check_ids
from mt_retro.overlap import overlaps
from mt_retro.stored import (
    ArrayRecord,
    StoredArray,
    blocks_of,
    naming,
    path_from,
    path_in,
    read_record,
)
from mt_retro.vectors import NamedEmbedding, Vectors
from mt_retro.work import Work

_FILE = "ids.npy"
_ROWS = 1 << 16  # rows to read at a time
_AT_ONCE = 1 << 20  # neighbours whose overlap is measured at a time


@dataclass(frozen=True, kw_only=True)
class NeighboursRecord(ChunksRecord):
    """A description of a folder of neighbours.

    Attributes:
        kind: Kind of the folder.
        database: Digest of the database.
        database_path: Path of the database, relative to the folder.
        neighbours: Number of neighbours of each chunk.
        max_overlap: Largest overlap of a neighbour; None without a bound.
        ids: The array of the neighbours.
    """

    kind: Literal["neighbours"]
    database: str
    database_path: str
    neighbours: int
    max_overlap: float | None
    ids: ArrayRecord

    def __post_init__(self) -> None:
        checks = self._checks("ids", self.ids, "int64")
        checks.at_least(1, "neighbours")
        if not checks.errors and self.ids.shape[1] != self.neighbours:
            checks.add("ids", f"{self.ids.shape[1]} a chunk, and neighbours is {self.neighbours}")
        checks.done()

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Self:
        """Read the description of a folder of neighbours.

        Raises:
            DataError: There are no neighbours in the folder, or the file is damaged.
        """
        return read_record(Path(folder), cls, "neighbours")


class Neighbours:
    """The neighbours of every chunk of a dataset in a database.

    Neighbours belong to (dataset, document, chunk), so every order, length and blend of rows uses
    the same neighbours.

    Args:
        folder: A folder that `find_neighbours` made.
        dataset: The dataset; by default the one at the path that the folder records.
        database: The database; by default the one at the path that the folder records.

    Attributes:
        chunks: The chunks of the dataset.
        database: The database.
        num_neighbours: Number of neighbours of a chunk, including missing ones.

    Raises:
        DataError: There are no neighbours in the folder.
        DataFileError: A file of the folder is damaged, or the dataset or the database is another.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        dataset: IndexedDataset | None = None,
        database: Database | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.record = record = NeighboursRecord.read(folder)
        self.num_neighbours = record.neighbours
        if database is None:
            with naming(self.folder, record.database_path) as path:
                database = Database(path)
        if dataset is None:
            with naming(self.folder, record.data_path) as path:
                dataset = IndexedDataset(path)
        self.database, self.chunks = database, Chunks(dataset, record.chunk)
        for name, path, expected, found in (
            ("database", database.folder, record.database, database.digest),
            ("dataset", dataset.prefix, record.data, data_digest(dataset)),
        ):
            if expected != found:
                text = f"are of another {name} than {path}: {expected[:16]} is expected, and that "
                text += f"has {found[:16]}; restore the {name}, or query again"
                raise DataFileError(str(self.folder), f"these neighbours {text}")
        self._ids = StoredArray(self.folder / _FILE, record.ids)
        if len(self._ids) != len(self.chunks):
            text = f"has {len(self._ids)} rows, and the dataset {len(self.chunks)} chunks"
            raise DataFileError(str(self._ids.path), f"{text}; query again")

    def __len__(self) -> int:
        return len(self.chunks)

    def ids(self, document: int) -> NDArray[np.int64]:
        """Return the neighbours of a document's chunks, the nearest first; -1 is a missing one.

        Shape:
            - result: [chunks of the document, neighbours], numbers of chunks of the database
        """
        numbers = self.chunks.of_document(document)
        return self._checked(self._ids.rows(numbers.start, numbers.stop))

    def gather(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the neighbours of chunks, given the numbers of the chunks; -1 is a missing one.

        Shape:
            - numbers: [n]; result: [n, neighbours]
        """
        return self._checked(self._ids.gather(numbers))

    def tokens(self, document: int) -> NDArray[np.int64]:
        """Return the tokens of the neighbours of a document's chunks and of their next chunks.

        Shape:
            - result: [chunks of the document, neighbours, 2 * chunk], with `mt_data.PADDING` in
              place of missing tokens
        """
        return self.database.tokens(self.ids(document))

    def count_missing(self) -> int:
        """Return the number of missing neighbours of all chunks."""
        return sum(int((rows < 0).sum()) for _, rows in blocks_of(self._ids, _ROWS))

    def verify(self) -> None:
        """Read all neighbours, and refuse damage.

        Raises:
            DataFileError: A block has changed, or a neighbour does not exist.
        """
        self._ids.verify()
        for _, rows in blocks_of(self._ids, _ROWS):
            self._checked(rows)

    def _checked(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        check_ids(ids, len(self.database), str(self._ids.path))
        return ids


def neighbours_of(
    dataset: IndexedDataset, folders: Sequence[str | os.PathLike[str]], database: Database
) -> Neighbours:
    """Open the folder with the neighbours of a dataset, found by the digest of the dataset.

    Args:
        dataset: The dataset.
        folders: Folders of neighbours of several datasets.
        database: The database of all these neighbours.

    Raises:
        DataError: No folder has neighbours of this dataset, or they are of another database.
    """
    data, others = data_digest(dataset), []
    for folder in folders:
        record = NeighboursRecord.read(folder)
        if record.data == data:
            return Neighbours(folder, dataset, database)
        others.append(
            f"{folder} is of {path_in(Path(folder), record.data_path)} ({record.data[:16]})"
        )
    text = f"no folder has neighbours of this dataset, whose digest is {data[:16]}: "
    text += f"{', '.join(others) or 'there is none'}; restore the dataset, or make them: mt-retro "
    raise DataFileError(dataset.prefix, f"{text}query {database.folder} --data {dataset.prefix}")


def find_neighbours(  # noqa: PLR0913 - each is one decision of a query
    database: Database,
    dataset: IndexedDataset,
    out: str | os.PathLike[str],
    *,
    neighbours: int = 2,
    max_overlap: float | None = None,
    embedding: NamedEmbedding | Vectors | None = None,
    part: Part | None = None,
    progress: Progress | None = None,
) -> Neighbours | None:
    """Find and store the neighbours of every chunk of a dataset.

    No neighbour comes from the chunk's own document. The results of an earlier call with the same
    arguments are kept. The parts may be made by several processes that share the file system; the
    last one joins them.

    Args:
        database: The database to search.
        dataset: The tokens.
        out: The new folder.
        neighbours: Number of neighbours of a chunk. If there are fewer, the rest is -1.
        max_overlap: Largest overlap of a neighbour, in [0, 1): the share of the chunk and the next
            chunk of its document that the neighbour and its continuation may repeat, in a run of
            tokens.
        embedding: Function from chunks to vectors that made the database, or the vectors of the
            dataset; by default the vectors in the database, else the built-in function.
        part: Share of the chunks; by default all of them.
        progress: Where to show the progress.

    Returns:
        The neighbours; None if other parts are missing.

    Raises:
        DataError: An argument is wrong, the vectors come from another embedding, the tokens from
            another tokenizer, or the folder holds something else.
        DataFileError: A file of the database is damaged.
    """
    if neighbours < 1 or (max_overlap is not None and not 0 <= max_overlap < 1):
        text = f"neighbours is {neighbours}, and max_overlap {max_overlap}; use 1 or more, and a "
        raise DataError(f"{text}share in [0, 1)")
    folder = Path(out)
    chunks, data = Chunks(dataset, database.chunk), data_digest(dataset)
    check_tokenizers([chunks, *database.sources])
    own = database.first_of(data)
    vectors_of = _vectors_of(database, chunks, data, embedding)
    plan = {
        **chunks.plan("neighbours", folder),
        "database": database.digest,
        "database_path": path_from(folder, database.folder),
        "neighbours": neighbours,
        "max_overlap": max_overlap,
    }

    def make(start: int, stop: int) -> NDArray[np.int64]:
        numbers = np.arange(start, stop)
        excluded = np.zeros((len(numbers), 2), np.int64)
        if own is not None:
            excluded = own + chunks.neighbourhoods(numbers)
        queries = vectors_of(numbers)
        if max_overlap is None:
            return database.search(queries, neighbours, excluded=excluded)[0]
        texts = chunks.tokens(numbers, continued=True)
        return _bounded(database, queries, texts, excluded, neighbours, max_overlap)

    shape = (len(chunks), neighbours)
    work = Work(folder=folder, name=_FILE, plan=plan, shape=shape, dtype="int64")

    def record_of(array: ArrayRecord) -> object:
        return plan | {"ids": array}

    is_complete = work.run(make, record_of, part=part, progress=progress)
    return Neighbours(folder, dataset, database) if is_complete else None


def _vectors_of(
    database: Database,
    chunks: Chunks,
    data: str,
    embedding: NamedEmbedding | Vectors | None,
) -> Callable[[NDArray[np.int64]], NDArray]:
    """Return the function from numbers of chunks to their vectors."""
    if isinstance(embedding, Vectors):
        name, found = embedding.record.embedding, embedding.array.gather
        if (embedding.record.data, embedding.record.chunk) != (data, chunks.size):
            text = f"these vectors are not of the chunks of {chunks.dataset.prefix}, or it changed"
            raise DataFileError(str(embedding.folder), f"{text}; embed them anew")
    elif (own := database.first_of(data)) is not None:
        return lambda numbers: database.vectors.gather(own + numbers)
    else:
        embed = database.embedding if embedding is None else embedding
        name = embed.name

        def found(numbers: NDArray[np.int64]) -> NDArray:
            return np.asarray(embed(chunks.tokens(numbers)))

    if name != database.record.embedding:
        text = f"has vectors of {database.record.embedding}, and these are of {name}"
        raise DataError(f"{database.folder} {text}; use one embedding for both")
    return found


def _bounded(
    database: Database,
    queries: NDArray,
    texts: NDArray[np.int64],
    excluded: NDArray[np.int64],
    k: int,
    most: float,
) -> NDArray[np.int64]:
    """Return the k nearest chunks that repeat at most the share `most` of each query's text."""
    ids = np.full((len(queries), k), -1, np.int64)
    left, wanted = np.arange(len(queries)), min(4 * k + 8, len(database))
    while len(left) and wanted:
        undone: list[NDArray[np.int64]] = []
        step = max(1, _AT_ONCE // (wanted * texts.shape[1]))
        for rows in (left[start : start + step] for start in range(0, len(left), step)):
            found, _ = database.search(queries[rows], wanted, excluded=excluded[rows])
            shares = overlaps(texts[rows], database.tokens(found))
            is_kept = (found >= 0) & (shares <= most)
            rank = np.cumsum(is_kept, axis=1) - 1
            is_kept &= rank < k
            row, column = np.nonzero(is_kept)
            ids[rows] = -1
            ids[rows[row], rank[row, column]] = found[row, column]
            is_done = (is_kept.sum(axis=1) == k) | (found[:, -1] < 0) | (wanted == len(database))
            undone.append(rows[~is_done])
        left, wanted = np.concatenate(undone), min(4 * wanted, len(database))
    return ids
