"""Data sets that make the rows of a batch themselves, and rows in order for evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import cast

import numpy as np
from mt_files import RowField
from numpy.typing import NDArray

from mt_data.datasets.batch import MicroBatch, Packing, Rows, RowSource, Samples, empty_array
from mt_data.datasets.identity import digest_of
from mt_data.error import DataError


def window_numbers(
    count: int, size: int, *, dp_rank: int, dp_size: int, limit: int | None
) -> Iterator[NDArray[np.int64]]:
    """Yield the window numbers of each batch of a rank, filled with -1 to full batches.

    Args:
        count: Number of windows.
        size: Number of windows in a batch.
        dp_rank: This rank's index along the data-parallel axis.
        dp_size: Number of ranks along that axis.
        limit: Number of windows to use; None uses all.

    Raises:
        DataError: A number is out of range.
    """
    if size < 1 or not 0 <= dp_rank < dp_size:
        raise DataError(
            f"size is {size}, dp_rank {dp_rank}, dp_size {dp_size}; size must be at least 1 "
            "and dp_rank lie in [0, dp_size)"
        )
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}; it must be at least 1, or None")
    count = count if limit is None else min(limit, count)
    for turn in range(-(-count // (size * dp_size))):
        first = (turn * dp_size + dp_rank) * size
        windows = np.arange(first, first + size)
        yield np.where(windows < count, windows, -1)


class InOrder(ABC):
    """Rows that can be read in order, for evaluation."""

    @abstractmethod
    def __len__(self) -> int: ...

    def batches(
        self,
        size: int,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        limit: int | None = None,
        rows: Rows | None = None,
    ) -> Iterator[MicroBatch]:
        """Yield this rank's batches of `size` rows, from the first epoch.

        All batches have the same shape, and all ranks have the same number of them: missing rows
        are replaced by rows without labels, whose sample id is -1.

        Args:
            size: Number of rows in a batch.
            dp_rank: This rank's index along the data-parallel axis.
            dp_size: Number of ranks along that axis.
            limit: Number of rows to use; None uses all.
            rows: The parts of each row that this rank needs; None means the whole row.

        Raises:
            DataError: A number is out of range.
        """
        turns = window_numbers(len(self), size, dp_rank=dp_rank, dp_size=dp_size, limit=limit)
        for numbers in turns:
            yield self._batch(numbers, rows or Rows())

    def _batch(self, numbers: NDArray[np.int64], rows: Rows) -> MicroBatch:
        """Make the rows of the given numbers; -1 means a row without labels."""
        return rows.read(cast("Samples | RowSource", self), numbers)


class RowDataset(InOrder):
    """A data set that declares the arrays of its rows, and makes them.

    Nothing else lists these arrays: batches, checks of token ids, counts of labels and a rank's
    part of a row follow from `fields` and `sizes`. A row depends on the data and its number alone,
    never on a layout or on earlier reads; so a run resumes from the number of its samples.

    Attributes:
        sequence_length: Number of tokens in a row that ranks of a context-parallel group share.
        packing: Whether the rows have several documents, for messages.
    """

    sequence_length: int
    packing: Packing = "none"

    @property
    @abstractmethod
    def fields(self) -> tuple[RowField, ...]:
        """The arrays of a row."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of each dim that `fields` name."""
        return {"tokens": self.sequence_length}

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows in an epoch."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in an epoch: the share of the data set in a blend without weights."""
        return len(self) * self.sequence_length

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Digest of the data and of everything that decides the rows and their order."""

    @abstractmethod
    def row(self, index: int) -> Mapping[str, NDArray]:
        """Return the arrays of row `index`, 0 or more, in the endless stream of epochs."""

    def describe(self) -> str:
        """Return a sentence on the rows, for the start of a run; by default there is none."""
        return ""

    def empty(self) -> dict[str, NDArray]:
        """Return an empty row, without labels."""
        return {each.name: empty_array(each, self.sizes) for each in self.fields}


def check_equal_rows(datasets: Sequence[RowDataset]) -> None:
    """Check that rows of all data sets fit into one batch.

    Raises:
        DataError: Rows of the data sets differ in their fields or sizes.
    """
    first = datasets[0]
    for number, other in enumerate(datasets):
        if (other.fields, other.sizes) != (first.fields, first.sizes):
            raise DataError(
                f"rows of data set {number} have other fields or sizes than those of data set "
                f"0: {other.sizes} and {first.sizes}; mix data sets that make equal rows"
            )


class JoinedRows(RowDataset):
    """The first epochs of several data sets one after the other, for evaluation.

    Args:
        datasets: At least one data set.

    Raises:
        DataError: Rows of the data sets differ in their fields or sizes.
    """

    def __init__(self, datasets: Sequence[RowDataset]) -> None:
        check_equal_rows(datasets)
        self._datasets = tuple(datasets)
        self._ends = list(accumulate(map(len, datasets)))
        self.sequence_length, self.packing = datasets[0].sequence_length, datasets[0].packing

    @property
    def fields(self) -> tuple[RowField, ...]:
        """The arrays of a row."""
        return self._datasets[0].fields

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of each dim that `fields` name."""
        return self._datasets[0].sizes

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def fingerprint(self) -> str:
        """Digest of the data sets."""
        return digest_of([each.fingerprint for each in self._datasets])

    def empty(self) -> dict[str, NDArray]:
        """Return a row without labels."""
        return self._datasets[0].empty()

    def row(self, index: int) -> Mapping[str, NDArray]:
        """Return the arrays of a row; past the end, rows repeat."""
        number = index % len(self)
        which = int(np.searchsorted(self._ends, number, side="right"))
        return self._datasets[which].row(number - (self._ends[which - 1] if which else 0))
