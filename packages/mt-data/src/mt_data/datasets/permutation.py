"""A keyed permutation, computed and never stored."""

from __future__ import annotations

import hashlib
import operator
from typing import overload

import numpy as np
from numpy.typing import NDArray

from mt_data.error import DataError

ROUNDS = 8
MASK = (1 << 64) - 1


class Permutation:
    """A bijection of [0, size) that depends only on `size` and the key.

    It is a Feistel network over pairs (a, b) with a < A, b < B, where A·B is just above `size`;
    results outside the range pass through it again (cycle walking). Every element costs the same,
    so any position can be read without building the whole order, which is the same on every machine
    and numpy version.

    Args:
        size: Number of elements, at least 1.
        key: Integers and strings, for example a seed, an epoch and a purpose.

    Shape:
        - `permutation(i)` for i of any shape, int64 in and out.
    """

    def __init__(self, size: int, *key: int | str) -> None:
        size = operator.index(size)
        if size < 1:
            raise DataError(f"a permutation needs at least 1 element, got size {size}")
        self.size = size
        self._left = max(1, int(np.ceil(np.sqrt(size))))
        self._right = -(-size // self._left)
        # Plain ints: numpy's have another repr.
        parts = [part if isinstance(part, str) else operator.index(part) for part in key]
        text = repr((size, *parts)).encode()
        self._keys = [
            int.from_bytes(hashlib.blake2b(text, digest_size=8, salt=bytes([turn])).digest(), "big")
            for turn in range(ROUNDS)
        ]

    @overload
    def __call__(self, index: int) -> int: ...
    @overload
    def __call__(self, index: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def __call__(self, index: int | NDArray[np.int64]) -> int | NDArray[np.int64]:
        """Return the image of element `index`."""
        if isinstance(index, np.ndarray):
            return self._many(index)
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is outside a permutation of {self.size} elements")
        result = self._turn(int(index))
        while result >= self.size:
            result = self._turn(result)
        return result

    def _many(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        if index.size and (index.min() < 0 or index.max() >= self.size):
            raise IndexError(f"indices outside a permutation of {self.size} elements")
        result = self._turn(index.astype(np.uint64))
        outside = result >= np.uint64(self.size)
        while outside.any():
            result[outside] = self._turn(result[outside])
            outside = result >= np.uint64(self.size)
        return result.astype(np.int64)

    def _turn(self, value):  # noqa: ANN001, ANN202 - int or uint64 array alike
        left, right = value // self._right, value % self._right
        for turn, key in enumerate(self._keys):
            if turn % 2:
                right = (right + _mix(left, key) % self._right) % self._right
            else:
                left = (left + _mix(right, key) % self._left) % self._left
        return left * self._right + right


def _mix(value, key: int):  # noqa: ANN001, ANN202 - int or uint64 array alike
    """Apply SplitMix64's finaliser to value + key, modulo 2**64."""
    mixed = (value + key) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)
