"""An embedding that needs no model: hashed n-grams of tokens."""

from __future__ import annotations

import numpy as np
from mt_data import PADDING, DataError
from numpy.typing import NDArray

GRID = 1024  # values are multiples of 1 / GRID
_ODD, _STEP = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x9E3779B97F4A7C15)


class NGramEmbedding:
    """Vectors of chunks by the tokens and the runs of tokens that they share.

    Each run of 1 to `longest` tokens is hashed to one dim and a sign, and counted there (Weinberger
    et al., 2009, "Feature hashing for large scale multitask learning"). The counts are scaled to a
    length of 1 and rounded to multiples of 1 / 1024. So the vectors are the same on every machine,
    and the product of two vectors has no rounding in fp32: equal distances are exactly equal.

    Args:
        dim: Number of dims.
        longest: Number of tokens in the longest run.

    Attributes:
        name: Name of the embedding with its arguments, which a database records.

    Shape:
        - `embedding(chunks)`: [n, m] tokens, with `mt_data.PADDING` after the last of a chunk;
          [n, dim] float32
    """

    def __init__(self, dim: int = 256, longest: int = 3) -> None:
        if not 1 <= dim <= 1 << 16 or not 1 <= longest <= 64:
            text = f"dim is {dim} and longest {longest}; use 1 to 65,536 dims and 1 to 64 tokens"
            raise DataError(text)
        self.dim, self.longest = dim, longest
        self.name = f"ngrams: version 1, {dim} dims, 1 to {longest} tokens"

    def __call__(self, chunks: NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the vectors of chunks."""
        count, width = chunks.shape
        tokens = chunks.astype(np.int64).view(np.uint64)
        rows = np.arange(count, dtype=np.int64)[:, None] * self.dim
        hashes = np.zeros_like(tokens)
        sums = np.zeros(count * self.dim)
        for length in range(1, min(self.longest, width) + 1):
            last = tokens[:, length - 1 :]  # the last token of each run
            hashes = _mixed(hashes[:, : last.shape[1]] + last + _STEP)
            is_whole = chunks[:, length - 1 :] != PADDING
            places = rows + (hashes % np.uint64(self.dim)).astype(np.int64)
            signs = np.where(hashes >> np.uint64(63), -1.0, 1.0)
            sums += np.bincount(places[is_whole], signs[is_whole], minlength=len(sums))
        sums = sums.reshape(count, self.dim)
        sizes = np.sqrt((sums * sums).sum(axis=1, keepdims=True))
        return (np.rint(sums / np.maximum(sizes, 1) * GRID) / GRID).astype(np.float32)


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of SplitMix64."""
    value = (value ^ (value >> np.uint64(30))) * _ODD
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
