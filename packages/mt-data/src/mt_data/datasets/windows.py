"""Evaluation windows: every token of a dataset is a label exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Protocol, cast

import numpy as np
from mt_files import shorten
from numpy.typing import NDArray

from mt_data.datasets.batch import MicroBatch, Rows, Samples
from mt_data.datasets.gpt import PADDING
from mt_data.datasets.row_dataset import InOrder
from mt_data.error import DataError, at_least


class TokenStream(Protocol):
    """A source of tokens read as one stream, such as `IndexedDataset`."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the stream."""
        ...

    @property
    def lengths(self) -> NDArray[np.integer]:
        """Number of tokens of each document."""
        ...

    def stream(self, start: int, length: int) -> NDArray:
        """Return tokens [start, start + length)."""
        ...


class TokenRanges:
    """Ranges of the sequences of one or several sources, read as one stream.

    Args:
        parts: Each source with the range of its sequences, such as one of `split_ranges`.
    """

    def __init__(self, parts: Sequence[tuple[TokenStream, range]]) -> None:
        cut = [source.lengths[part.start : part.stop] for source, part in parts]
        self.lengths = np.concatenate(cut)
        self._sources = [source for source, _ in parts]
        before = [source.lengths[: part.start] for source, part in parts]
        self._first = [int(lengths.sum(dtype=np.int64)) for lengths in before]
        sizes = [int(lengths.sum(dtype=np.int64)) for lengths in cut]
        self._bounds = list(accumulate(sizes, initial=0))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all ranges together."""
        return self._bounds[-1]

    def stream(self, start: int, length: int) -> NDArray:
        """Return tokens [start, start + length) of the ranges in order."""
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise IndexError(f"tokens [{start}, {start + length}) of {self.num_tokens}")
        pieces = []
        for source, first, begin, end in zip(
            self._sources, self._first, self._bounds, self._bounds[1:], strict=False
        ):
            low, high = max(start, begin), min(start + length, end)
            if low < high:
                pieces.append(source.stream(first + low - begin, high - low))
        return np.concatenate(pieces or [np.empty(0, np.int64)])

    def documents(self) -> Iterator[NDArray]:
        """Yield the tokens of each sequence."""
        start = 0
        for length in self.lengths.tolist():
            yield self.stream(start, length)
            start += length


class SequentialWindows(InOrder):
    """Windows over a token stream, in order, for evaluation.

    The first window has `sequence_length` labels; each later one moves by `stride` and has `stride`
    new labels. A stride below sequence_length costs more, but gives every label at least
    sequence_length - stride tokens of context. Other labels are -100. The last window is padded.

    Args:
        indexed: The tokens.
        sequence_length: Number of tokens in a window.
        stride: Number of new labels in a window; None means sequence_length.
        start_id: Token to put before the stream, usually the end-of-document id. If None, the very
            first token has no context and is the only token that is not a label.

    Shape:
        - `windows[i]`: (tokens [sequence_length], labels [sequence_length]) int64
    """

    def __init__(
        self,
        indexed: TokenStream,
        sequence_length: int,
        stride: int | None = None,
        *,
        start_id: int | None = None,
    ) -> None:
        at_least(1, sequence_length=sequence_length)
        stride = sequence_length if stride is None else stride
        if not 1 <= stride <= sequence_length:
            raise DataError(f"stride is {stride}; it must lie in [1, {sequence_length}]")
        if not hasattr(indexed, "num_tokens"):
            raise DataError(f"windows need an IndexedDataset, not {shorten(indexed)}")
        self.indexed, self.sequence_length, self.stride = indexed, sequence_length, stride
        self.start_id = start_id
        self.num_labels = indexed.num_tokens - (start_id is None)
        if self.num_labels < 1:
            raise DataError(f"there is nothing to predict in {indexed.num_tokens} tokens")

    def __len__(self) -> int:
        """Return the number of windows."""
        return 1 + -(-max(0, self.num_labels - self.sequence_length) // self.stride)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} does not exist; there are {len(self)}")
        batch = self._batch(np.array([index]), Rows())
        return batch["tokens"][0], batch["labels"][0]

    def sample(self, index: int, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Return tokens [begin, end) of the sequence_length + 1 tokens of a window, padded.

        Window -1 consists of padding.
        """
        row = np.full((self.sequence_length + 1 if end is None else end) - begin, PADDING, np.int64)
        if index < 0:
            return row
        shift = 0 if self.start_id is None else 1
        start = index * self.stride + begin - shift
        if self.start_id is not None and start < 0:
            row[0] = self.start_id
        skip = max(0, -start)
        count = min(len(row) - skip, self.indexed.num_tokens - start - skip)
        if count > 0:
            row[skip : skip + count] = self.indexed.stream(start + skip, count)
        return row

    def sample_documents(self, index: int) -> NDArray[np.int64]:
        """Return the document number of each token; `start_id` has a separate number."""
        if index < 0:
            return np.full(self.sequence_length + 1, PADDING, np.int64)
        first = index * self.stride - (self.start_id is not None)
        place = np.arange(first, first + self.sequence_length + 1)
        documents = np.where(place < 0, -1, np.searchsorted(self._ends, place, side="right"))
        return np.where(place < self.indexed.num_tokens, documents, PADDING)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.indexed.lengths, dtype=np.int64)

    def _batch(self, numbers: NDArray[np.int64], rows: Rows) -> MicroBatch:
        if rows.parts is None:
            rows = replace(rows, parts=((0, self.sequence_length),))
        batch = rows.read(cast("Samples", self), numbers)  # with parts it only uses `sample`
        context = rows.columns(self.sequence_length) < self.sequence_length - self.stride
        batch["labels"][(numbers > 0)[:, None] & context] = PADDING
        return batch
