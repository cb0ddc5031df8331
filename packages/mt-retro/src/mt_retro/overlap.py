"""Overlap: the share of a text that another text repeats."""

from __future__ import annotations

import numpy as np
from mt_data import PADDING
from numpy.typing import NDArray

_MOST = 1 << 22  # pairs of tokens that are compared at a time


def overlaps(texts: NDArray[np.integer], others: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the length of the longest common run of tokens, as a share of the length of the text.

    Borgeaud et al. (2022), section 2.6, measure leakage through retrieval in this way. The overlap
    of an empty text is 0.

    Shape:
        - texts: [n, a]; others: [n, k, b], each filled after its end with `mt_data.PADDING`
        - result: [n, k], from 0 to 1
    """
    (count, width), (_, k, _) = texts.shape, others.shape
    longest = np.zeros((count, k), np.int64)
    step = max(1, _MOST // max(1, k * others.shape[2]))
    for start in range(0, count, step):
        part = slice(start, start + step)
        # The length of the run that ends at each token of the others, and at a token of the text.
        runs = np.zeros(others[part].shape, np.int16 if width < 1 << 15 else np.int64)
        for column in range(width):
            token = texts[part, column, None, None]
            after = np.ones_like(runs)
            after[:, :, 1:] += runs[:, :, :-1]
            runs = after * ((others[part] == token) & (token != PADDING))
            np.maximum(longest[part], runs.max(axis=2, initial=0), out=longest[part])
    lengths = (texts != PADDING).sum(axis=1, keepdims=True)
    return longest / np.maximum(lengths, 1)
