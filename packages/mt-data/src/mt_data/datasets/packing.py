"""Best-fit packing of items into rows of equal length with little padding."""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mt_data.datasets.permutation import Permutation
from mt_data.error import DataError, at_least

_WINDOWS_IN_MEMORY = 4


def best_fit(lengths: ArrayLike, size: int) -> list[NDArray[np.int64]]:
    """Return the numbers of the items in each row, by best fit decreasing.

    Items are placed from the longest to the shortest. Each goes into the row with the least room
    that fits it, and of several such rows into the one used last. A row needs one lookup in a set
    of bits, so a million lengths take about a second.

    Args:
        lengths: Length of each item, 1 to `size`.
        size: Room of a row.

    Returns:
        Numbers of the items of each row, the longest first.

    Raises:
        DataError: A length is out of range.

    Shape:
        - lengths: [N]
    """
    at_least(1, size=size)
    size = operator.index(size)
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise DataError(f"lengths must be integers of one dim, got {given.dtype} {given.shape}")
    wrong = np.flatnonzero((given < 1) | (given > size))
    if len(wrong):
        raise DataError(
            f"item {wrong[0]} has the length {given[wrong[0]]}; a row takes 1 to {size}, so cut "
            "longer ones or leave them out"
        )
    order = np.argsort(-given.astype(np.int64), kind="stable")
    rows: list[list[int]] = []
    room: list[list[int]] = [[] for _ in range(size)]  # rows by the room that they have
    free = 0  # bit n is set if a row has the room n
    for number, length in zip(order.tolist(), given[order].tolist(), strict=True):
        fitting = free >> length
        if fitting:
            left = (fitting & -fitting).bit_length() - 1 + length
            row = room[left].pop()
            if not room[left]:
                free ^= 1 << left
            rows[row].append(number)
            left -= length
        else:
            row, left = len(rows), size - length
            rows.append([number])
        if left:
            if not room[left]:
                free |= 1 << left
            room[left].append(row)
    return [np.array(row, np.int64) for row in rows]


class PackedOrder:
    """The items of each row, in an endless stream of epochs.

    The items of an epoch are shuffled and taken in windows, whose items fill rows by best fit. The
    rows of a window follow from seed, epoch and window alone.

    Args:
        lengths: Length of each item, 1 to `size`.
        size: Room of a row; None puts one item in each row.
        window: Number of items to pack together.
        seed: Seed of the order.
        name: Name of the items; the order depends on it too.

    Shape:
        - lengths: [N]
    """

    def __init__(
        self, lengths: NDArray[np.int64], size: int | None, *, window: int, seed: int, name: str
    ) -> None:
        self._lengths, self._size, self._window = lengths, size, window
        self._seed, self._name = seed, name
        self._epochs: dict[int, NDArray[np.int64]] = {}
        self._plans: dict[tuple[int, int], list[NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        """Return the number of rows of the first epoch; another may have a few more or less."""
        return int(self._row_ends(0)[-1])

    def items(self, index: int) -> list[int]:
        """Return the numbers of the items of row `index`."""
        index, epoch = operator.index(index), 0
        if index < 0:
            raise IndexError(f"row {index} does not exist; an index is 0 or more")
        if self._size is None:
            epoch, place = divmod(index, len(self._lengths))
            return [self._order(epoch)(place)]
        while index >= (count := int(self._row_ends(epoch)[-1])):
            index, epoch = index - count, epoch + 1
        ends = self._row_ends(epoch)
        window = int(np.searchsorted(ends, index, side="right"))
        before = int(ends[window - 1]) if window else 0
        return self._plan(epoch, window, self._size)[index - before].tolist()

    def _order(self, epoch: int) -> Permutation:
        return Permutation(len(self._lengths), self._seed, epoch, self._name)

    def _row_ends(self, epoch: int) -> NDArray[np.int64]:
        """Return the number of rows of an epoch up to the end of each window."""
        if self._size is None:
            return np.array([len(self._lengths)])
        if epoch not in self._epochs:
            windows = range(-(-len(self._lengths) // self._window))
            counts = [len(self._plan(epoch, window, self._size)) for window in windows]
            self._epochs[epoch] = np.cumsum(counts)
        return self._epochs[epoch]

    def _plan(self, epoch: int, window: int, size: int) -> list[NDArray[np.int64]]:
        """Return the items of each row of a window."""
        key = epoch, window
        if key not in self._plans:
            begin = window * self._window
            places = np.arange(begin, min(begin + self._window, len(self._lengths)))
            items = self._order(epoch)(places)
            rows = best_fit(self._lengths[items], size)
            order = Permutation(len(rows), self._seed, epoch, window, "rows")
            self._plans[key] = [items[rows[order(number)]] for number in range(len(rows))]
            while len(self._plans) > _WINDOWS_IN_MEMORY:
                del self._plans[next(iter(self._plans))]
        return self._plans[key]
