"""Best-fit packing: which lengths share a row, so that rows of equal length have little padding."""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mt_data.error import DataError, at_least


def best_fit(lengths: ArrayLike, size: int) -> list[NDArray[np.int64]]:
    """Return the numbers of the lengths in each row, by best fit decreasing.

    The longest comes first, and each goes into the row that it fills best: the one with the least
    room in which it fits, and of equal ones the row used last. A row needs one lookup in a set of
    bits, so a million lengths take about a second.

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
