"""Rows of documents beside the neighbours of their chunks."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import ClassVar

import numpy as np
from mt_data import PADDING, DataError, GatheredRow, PackedOrder, RowDataset, text_fields
from mt_files import RowField
from numpy.typing import NDArray

from mt_retro.overlap import overlaps
from mt_retro.query import Neighbours
from mt_retro.stored import digest_of


@cache  # each row asks for them
def retro_fields() -> tuple[RowField, ...]:
    """Return the arrays of a row of documents with neighbours.

    Each of the ranks that share a row has the neighbours of its own chunks. All stages of a
    pipeline read them, since any stage may encode them.
    """
    return (
        *text_fields(packed=True),
        RowField(
            name="neighbours", dims=("chunks", "neighbours", "neighbour_tokens"), is_tokens=True
        ),
        RowField(name="neighbour_lengths", dims=("chunks", "neighbours")),
    )


_TEXT = tuple(field.name for field in text_fields(packed=True))
_NEIGHBOURS = ("neighbours", "neighbour_lengths")


class RetroDataset(RowDataset):
    """Rows of documents that begin on a grid of chunks, with the neighbours of each chunk.

    A document longer than a row goes on in further rows. The documents, or parts, of an epoch are
    shuffled and fill rows by best fit; attention, positions and labels stay within each. Each
    document is padded to the end of its last chunk, without labels. Rows depend on the data,
    their number and the arguments; all seeds, lengths and blends use the same stored neighbours.

    A token sees the neighbours of the last chunk of its document that ends at the token or before
    it. So a label in chunk v is predicted from the neighbours of chunk v - 1, and a label in chunk
    0 without neighbours.

    Args:
        neighbours: The dataset, and the neighbours of its chunks.
        sequence_length: Number of tokens in a row, a multiple of the size of a chunk.
        num_neighbours: Number of nearest neighbours of a chunk; by default all stored ones.
        retrieves: Whether the rows have their neighbours; otherwise all neighbours are missing.
        overlap: Range [low, high) of shares: a label stays only if a neighbour that it is predicted
            from repeats such a share of its chunk, as `overlaps` measures it, and none repeats
            more. A `high` of 1 includes 1. By default all labels stay.
        seed: Seed of the order.

    Attributes:
        window: Number of documents to pack together.

    Raises:
        DataError: A number is wrong, or no document has two tokens.

    Shape:
        - `row(i)`: `tokens`, `labels`, `documents`, `positions` [S] as in packed text; `documents`
          is -100 after the last one; `neighbours` [S / m, k, 2 m], token ids of each neighbour and
          of the next chunk, 0 after their end; `neighbour_lengths` [S / m, k], the number of
          tokens of each, 0 for a missing neighbour; all int64
    """

    window: ClassVar[int] = 4096

    def __init__(
        self,
        neighbours: Neighbours,
        *,
        sequence_length: int,
        num_neighbours: int | None = None,
        retrieves: bool = True,
        overlap: tuple[float, float] | None = None,
        seed: int = 0,
    ) -> None:
        chunk, stored = neighbours.chunks.size, neighbours.num_neighbours
        k = stored if num_neighbours is None else num_neighbours
        if not 1 <= k <= stored:
            text = f"num_neighbours is {k}, and {neighbours.folder} has {stored} of each chunk"
            raise DataError(f"{text}; use 1 to {stored}, or query for more")
        if sequence_length < chunk or sequence_length % chunk:
            text = f"sequence_length is {sequence_length}, and a chunk has {chunk} tokens"
            raise DataError(f"{text}; use a multiple of {chunk}")
        self.neighbours, self.num_neighbours = neighbours, k
        self.sequence_length, self.packing = sequence_length, "documents"
        self.retrieves, self.overlap = retrieves, overlap
        # A document has one label fewer than tokens. Parts of all documents are numbered in order.
        labels = np.maximum(neighbours.chunks.lengths - 1, 0)
        self._first_part = np.zeros(len(labels) + 1, np.int64)
        np.cumsum(-(-labels // sequence_length), out=self._first_part[1:])
        counts = np.diff(self._first_part)
        sizes = np.full(self._first_part[-1], sequence_length, np.int64)
        has_labels = counts > 0
        rest = labels[has_labels] - (counts[has_labels] - 1) * sequence_length
        sizes[self._first_part[1:][has_labels] - 1] = rest
        if not len(sizes):
            prefix = neighbours.chunks.dataset.prefix
            raise DataError(
                f"{prefix}: has no document of two tokens, so there is nothing to learn"
            )
        self._num_labels = int(labels.sum())
        self._places = np.arange(sequence_length)
        self._blank = np.stack([self.empty()[name] for name in _TEXT])
        self._sizes = sizes
        how = {"window": self.window, "seed": operator.index(seed), "name": "parts"}
        self._order = PackedOrder(-(-sizes // chunk), sequence_length // chunk, **how)
        self._identity = {
            "rows": "retro",
            "neighbours": digest_of(neighbours.record),  # with the dataset and the database
            "sequence_length": sequence_length,
            "num_neighbours": k,
            "retrieves": retrieves,
            "overlap": overlap,
            **how,
        }

    def changed(
        self, *, retrieves: bool = True, overlap: tuple[float, float] | None = None
    ) -> RetroDataset:
        """Return the same rows with another `retrieves` and `overlap`."""
        other = copy.copy(self)
        other.retrieves, other.overlap = retrieves, overlap
        other._identity = {**self._identity, "retrieves": retrieves, "overlap": overlap}
        return other

    @property
    def fields(self) -> tuple[RowField, ...]:
        """The arrays of a row."""
        return retro_fields()

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of tokens and chunks in a row, of neighbours, and of tokens in a neighbour."""
        chunk = self.neighbours.chunks.size
        return {
            "tokens": self.sequence_length,
            "chunks": self.sequence_length // chunk,
            "neighbours": self.num_neighbours,
            "neighbour_tokens": 2 * chunk,
        }

    @property
    def num_tokens(self) -> int:
        """Number of tokens in an epoch."""
        return int(self.neighbours.chunks.lengths.sum())

    @property
    def fingerprint(self) -> str:
        """Digest of the data, the neighbours and everything that decides rows and their order."""
        return digest_of(self._identity)

    def __len__(self) -> int:
        """Return the number of rows of the first epoch; another may have a few more or less."""
        return len(self._order)

    @cached_property
    def filling(self) -> float:
        """Share of places with a label in the rows of the first epoch."""
        return self._num_labels / (len(self) * self.sequence_length)

    def describe(self) -> str:
        """Return a sentence on the rows."""
        neighbours = f"{self.num_neighbours} neighbours" if self.retrieves else "no neighbours"
        size = self.neighbours.chunks.size
        text = f"{len(self)} rows, filled to {self.filling:.1%}; {neighbours} for each chunk of "
        return f"{text}{size} tokens"

    def row(self, index: int) -> Mapping[str, NDArray]:
        """Return row `index` in the endless stream of epochs."""
        chunks, size = self.neighbours.chunks, self.neighbours.chunks.size
        at, texts, numbers = 0, [], []
        row = dict(zip(_TEXT, self._blank.copy(), strict=True))
        for number, (document, start, length) in enumerate(self.parts(index)):
            count = -(-length // size)
            text = chunks.read(document, start, length + 1)
            texts.append((at, text))
            row["tokens"][at : at + length], row["labels"][at : at + length] = text[:-1], text[1:]
            padded = slice(at, at + count * size)
            row["documents"][padded] = number
            row["positions"][padded] = self._places[: count * size]
            first = chunks.of_document(document).start + start // size
            numbers.append((first, first + count))
            at = padded.stop
        found = GatheredRow(self, row, _NEIGHBOURS, numbers)
        if self.overlap is not None:
            read, lengths = self._neighbours_of([found], fill=PADDING)
            for begin, text in texts:
                labels = row["labels"][begin : begin + len(text) - 1]
                labels[~self._is_kept(text, read[0, begin // size :])] = PADDING
            found.keep(neighbours=np.maximum(read[0], 0), neighbour_lengths=lengths[0])
        if not self.retrieves:
            found.keep(**self._none)
        return found

    def gather(self, rows: Sequence[GatheredRow]) -> None:
        """Read the neighbours of rows in one step."""
        for row, *found in zip(rows, *self._neighbours_of(rows, fill=0), strict=True):
            row.keep(**dict(zip(_NEIGHBOURS, found, strict=True)))

    def _neighbours_of(
        self, rows: Sequence[GatheredRow], *, fill: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the neighbours of rows; the content of a row is its ranges [begin, end) of chunks.

        Shape:
            - result: [rows, S / m, k, 2 m] and [rows, S / m, k]
        """
        ids = np.full((len(rows), self.sizes["chunks"], self.num_neighbours), -1, np.int64)
        parts = [np.arange(*ends) for row in rows for ends in row.content]
        near = self.neighbours.gather(np.concatenate(parts))[:, : self.num_neighbours]
        for own, row in zip(ids, rows, strict=True):
            count = sum(end - begin for begin, end in row.content)
            own[:count], near = near[:count], near[count:]
        return self.neighbours.database.read(ids, fill=fill)

    @cached_property
    def _none(self) -> Mapping[str, NDArray]:
        """The arrays of missing neighbours, which all rows without retrieval share."""
        empty = self.empty()
        for name in _NEIGHBOURS:
            empty[name].setflags(write=False)
        return {name: empty[name] for name in _NEIGHBOURS}

    def parts(self, index: int) -> list[tuple[int, int, int]]:
        """Return the document, the first token and the number of labels of each part of a row."""
        numbers = np.array(self._order.items(index), np.int64)
        documents = np.searchsorted(self._first_part, numbers, side="right") - 1
        starts = (numbers - self._first_part[documents]) * self.sequence_length
        columns = documents.tolist(), starts.tolist(), self._sizes[numbers].tolist()
        return list(zip(*columns, strict=True))

    def _is_kept(self, text: NDArray, read: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether the overlap of each label's chunk with its neighbours is in the range."""
        assert self.overlap is not None  # noqa: S101 - the caller's condition
        (low, high), size = self.overlap, self.neighbours.chunks.size
        chunks = np.full((-(-len(text) // size), size), PADDING, np.int64)
        chunks.reshape(-1)[: len(text)] = text
        read = read[: len(chunks) - 1]  # the neighbours of the chunk before
        shares = overlaps(chunks[1:], read).max(axis=1)
        is_kept = np.zeros(len(chunks), np.bool_)
        is_kept[1:] = (low <= shares) & ((shares < high) | ((shares == 1) & (high == 1)))
        is_kept[1:] &= (read != PADDING).any(axis=(1, 2))
        return np.repeat(is_kept, size)[1 : len(text)]
