"""Fixed-length training samples cut from a token dataset."""

from __future__ import annotations

import operator
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from mt_files import RowField, shorten
from numpy.typing import NDArray

from mt_data.datasets.identity import digest_of
from mt_data.datasets.order import OVERLAP, MegatronOrder, StableOrder
from mt_data.datasets.shared_order import OrderFolder
from mt_data.datasets.stream import Stream
from mt_data.error import DataError, at_least

PADDING = -100
SHARED_FROM = 1_000_000
"""Number of documents from which an order is worth a file."""


@cache  # each row asks for them
def text_fields(*, packed: bool) -> tuple[RowField, ...]:
    """Return the arrays of a row of running text.

    Args:
        packed: Whether attention stays within documents.
    """
    fields = (
        RowField(name="tokens", stages=("first", "last"), is_tokens=True),
        RowField(
            name="labels",
            fill=PADDING,
            is_tokens=True,
            counts="tokens",
            positions="positions" if packed else None,
        ),
    )
    of_documents = (
        RowField(name="documents", fill=PADDING, cut="whole"),
        RowField(name="positions"),
    )
    return (*fields, *of_documents) if packed else fields


class TokenSource(Protocol):
    """A source of tokens for `GPTDataset`, such as `IndexedDataset`."""

    @property
    def dtype(self) -> np.dtype:
        """Stored token dtype."""
        ...

    @property
    def lengths(self) -> NDArray[np.integer]:
        """Number of tokens of each sequence."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest that changes if the data changes."""
        ...

    def read(self, index: int, offset: int = 0, length: int | None = None) -> NDArray:
        """Return tokens [offset, offset + length) of one sequence."""
        ...


class GPTDataset:
    """Samples of `sequence_length + 1` tokens, running across document ends.

    The first `sequence_length` tokens of a sample are the input, the last `sequence_length` are the
    labels. Samples are located by arithmetic on demand. Memory use is 12 bytes for each document
    and epoch in use; with `order_folder` the processes of a node share them.

    Args:
        indexed: The source of tokens.
        sequence_length: Number of tokens that a sample advances.
        num_samples: `len` of the dataset; None means one epoch.
        seed: Seed of the order, which depends only on the seed and the epoch.
        order: "stable" (see `StableOrder`) or "megatron" (see `MegatronOrder`), which equals
            Megatron-LM's order for the same seed and num_samples.
        sequences: Range of sequences to use, for example one of `split_ranges`.
        keep_tail: Whether to draw the incomplete last sample of a stream, filled with `PADDING`.
        order_folder: Folder for files with the stable orders of large data sets (a million
            documents and more), which the processes of a node make once and share.

    Shape:
        - `dataset[i]`: [sequence_length + 1] int64
    """

    def __init__(  # noqa: PLR0913 - a data set's own settings, all but one by keyword
        self,
        indexed: TokenSource,
        *,
        sequence_length: int,
        num_samples: int | None = None,
        seed: int = 0,
        order: Literal["stable", "megatron"] = "stable",
        sequences: range | None = None,
        keep_tail: bool = False,
        order_folder: str | Path | None = None,
    ) -> None:
        at_least(1, sequence_length=sequence_length)
        if num_samples is not None and num_samples < 1:
            raise DataError(f"num_samples is {num_samples}; it must be at least 1, or None")
        if not hasattr(indexed, "dtype"):
            raise DataError(f"samples need an IndexedDataset, not {shorten(indexed)}")
        if indexed.dtype.kind not in "iu":
            raise DataError(
                f"the dataset stores {indexed.dtype.name}; training samples need integer tokens"
            )
        seed = operator.index(seed)
        self.indexed = indexed
        self.sequence_length = sequence_length
        self.sequences = self._checked_range(sequences, len(indexed.lengths))
        lengths = indexed.lengths[self.sequences.start : self.sequences.stop]
        self._order: StableOrder | MegatronOrder
        if order == "stable":
            folder = None
            if order_folder is not None and len(lengths) >= SHARED_FROM:
                span = [self.sequences.start, self.sequences.stop]
                identity = digest_of([indexed.fingerprint, span, seed])
                folder = OrderFolder(order_folder, identity)
            self._order = StableOrder(
                lengths, sequence_length, seed, keep_tail=keep_tail, folder=folder
            )
        elif order == "megatron":
            self._order = MegatronOrder(
                lengths, sequence_length, seed, keep_tail=keep_tail, num_samples=num_samples
            )
        else:
            raise DataError(f"order is {order!r}; choose 'stable' or 'megatron'")
        self._length = num_samples or self._order.num_samples
        self._identity = {
            "sequence_length": sequence_length,
            "seed": seed,
            "order": order,
            "sequences": [self.sequences.start, self.sequences.stop],
            "keep_tail": keep_tail,
            # Only in this order does the number of samples change the samples themselves.
            "num_samples": num_samples if order == "megatron" else None,
        }

    @staticmethod
    def _checked_range(sequences: range | None, count: int) -> range:
        sequences = range(count) if sequences is None else sequences
        if sequences.step != 1 or not 0 <= sequences.start <= sequences.stop <= count:
            raise DataError(f"sequences is {sequences}; it must lie in range(0, {count}), step 1")
        if not sequences:
            raise DataError("there are no sequences to draw samples from")
        return sequences

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the data."""
        return int(self.indexed.lengths.sum())

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples before data repeats (with order="megatron", before order repeats)."""
        return self._order.num_samples

    @property
    def fingerprint(self) -> str:
        """Digest of the data and of everything that decides the order.

        Equal fingerprints mean equal samples. Save it with a checkpoint, and compare it on resume.
        """
        identity = {"data": self.indexed.fingerprint, **self._identity}
        return digest_of(identity)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} does not exist; the dataset has {len(self)}")
        return self.sample(index % len(self))

    def sample(self, index: int, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Return tokens [begin, end) of sample `index` in the endless stream of epochs.

        `index` may exceed `len`. Only these tokens are read.
        """
        stream, start = self._find(index)
        end = self._end(begin, end)
        tokens = np.full(end - begin, PADDING, np.int64)
        done = 0
        count = min(end, stream.num_tokens - start) - begin
        for document, offset, length in stream.pieces(start + begin, max(count, 0)):
            tokens[done : done + length] = self.indexed.read(
                self.sequences[document], offset, length
            )
            done += length
        return tokens

    def sample_documents(self, index: int) -> NDArray[np.int64]:
        """Return the document number of each token of a sample, from 0; `PADDING` for padding.

        It reads no tokens.

        Shape:
            - Output: [sequence_length + 1]
        """
        stream, start = self._find(index)
        length = self.sequence_length + OVERLAP
        pieces = stream.pieces(start, min(length, stream.num_tokens - start))
        lengths = [length for _, _, length in pieces]
        documents = np.full(length, PADDING, np.int64)
        documents[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
        return documents

    def _find(self, index: int) -> tuple[Stream, int]:
        if index < 0:
            raise IndexError(f"sample {index} does not exist; an index is 0 or more")
        return self._order.find(index)

    def _end(self, begin: int, end: int | None) -> int:
        length = self.sequence_length + OVERLAP
        end = length if end is None else end
        if not 0 <= begin <= end <= length:
            raise IndexError(
                f"tokens [{begin}, {end}) of a sample do not exist; it has {length} tokens"
            )
        return end
