"""Evaluation windows: every token of a dataset is a label exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mt_data.batch import MicroBatch, micro_batch
from mt_data.error import DataError, quote
from mt_data.gpt import PADDING


class TokenStream(Protocol):
    """Tokens read as one row; `IndexedDataset` is one."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the stream."""
        ...

    def stream(self, start: int, length: int) -> NDArray:
        """Tokens [start, start + length)."""
        ...


class SequentialWindows:
    """Windows over a token stream, in order, for evaluation.

    The first window has `sequence_length` labels; each later one moves by `stride` and has
    `stride` new labels, so a stride below sequence_length gives every label at least
    sequence_length - stride tokens of context, for more work. Other labels are -100. The last
    window is padded.

    Args:
        indexed: the tokens.
        sequence_length: tokens in a window.
        stride: new labels in a window; sequence_length when None.
        start_id: token put before the stream, usually the end-of-document id. When None, the
            very first token has nothing before it and is the one token that is not a label.

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
        if sequence_length < 1:
            raise DataError(f"sequence_length is {sequence_length}; it must be at least 1")
        stride = sequence_length if stride is None else stride
        if not 1 <= stride <= sequence_length:
            raise DataError(f"stride is {stride}; it must lie in [1, {sequence_length}]")
        if not hasattr(indexed, "num_tokens"):
            raise DataError(f"windows need an IndexedDataset, not {quote(indexed)}")
        self.indexed, self.sequence_length, self.stride = indexed, sequence_length, stride
        self.start_id = start_id
        self.num_labels = indexed.num_tokens - (start_id is None)
        if self.num_labels < 1:
            raise DataError(f"there is nothing to predict in {indexed.num_tokens} tokens")

    def __len__(self) -> int:
        """Number of windows."""
        return 1 + -(-max(0, self.num_labels - self.sequence_length) // self.stride)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} does not exist; there are {len(self)}")
        row = self._row(index * self.stride)
        tokens, labels = row[:-1].copy(), row[1:].copy()
        if index:
            labels[: self.sequence_length - self.stride] = PADDING
        return tokens, labels

    def _row(self, start: int) -> NDArray[np.int64]:
        """sequence_length + 1 tokens of the stream, which begins with start_id if there is one."""
        row = np.full(self.sequence_length + 1, PADDING, np.int64)
        shift = 0 if self.start_id is None else 1
        first = max(0, start - shift)
        skip = first - (start - shift)
        count = min(len(row) - skip, self.indexed.num_tokens - first)
        row[skip : skip + count] = self.indexed.stream(first, count)
        if skip and self.start_id is not None:
            row[0] = self.start_id
        return row

    def batches(
        self, rows: int, *, dp_rank: int = 0, dp_size: int = 1, limit: int | None = None
    ) -> Iterator[MicroBatch]:
        """Batches of `rows` windows; with data parallelism, every dp_size-th batch.

        All batches have the same shape and all ranks the same number of them: missing rows are
        filled with windows without labels, whose sample id is -1.

        Args:
            rows: windows in a batch.
            dp_rank: this rank's index along the data-parallel axis.
            dp_size: ranks along that axis.
            limit: use the first `limit` windows only.
        """
        if rows < 1 or not 0 <= dp_rank < dp_size:
            raise DataError(
                f"rows is {rows}, dp_rank {dp_rank}, dp_size {dp_size}; rows must be at least 1 "
                "and dp_rank lie in [0, dp_size)"
            )
        if limit is not None and limit < 1:
            raise DataError(f"limit is {limit}; it must be at least 1, or None")
        count = len(self) if limit is None else min(limit, len(self))
        rounds = -(-count // (rows * dp_size))
        for turn in range(rounds):
            first = (turn * dp_size + dp_rank) * rows
            yield self._batch(range(first, min(first + rows, count)), rows)

    def _batch(self, windows: range, rows: int) -> MicroBatch:
        shape = (rows, self.sequence_length)
        tokens, labels = np.full(shape, PADDING, np.int64), np.full(shape, PADDING, np.int64)
        ids = np.full(rows, -1, np.int64)
        for row, window in enumerate(windows):
            tokens[row], labels[row] = self[window]
            ids[row] = window
        return micro_batch(tokens, labels, ids)
