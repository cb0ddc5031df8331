"""Documents read one after the other, from which samples are cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mt_data.datasets.permutation import Permutation

_BLOCK = 1 << 16  # documents whose places are computed together: they fit a processor's cache


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """Documents in reading order.

    Shape:
        - documents: [P] document ids; ends: [P] number of tokens up to the end of each, int64
    """

    documents: NDArray[np.integer]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, documents: NDArray[np.integer], lengths: NDArray[np.integer]) -> Stream:
        """Return the stream that reads the given documents in order."""
        return cls(documents=documents, ends=np.cumsum(lengths[documents], dtype=np.int64))

    @classmethod
    def shuffled(cls, lengths: NDArray[np.integer], shuffle: Permutation) -> Stream:
        """Return the stream that reads all documents, in the order of a permutation."""
        count = len(lengths)
        documents = np.empty(count, "<u4" if count <= 1 << 32 else "<u8")
        ends, tokens = np.empty(count, "<i8"), 0
        for start in range(0, count, _BLOCK):
            own = shuffle(np.arange(start, min(start + _BLOCK, count)))
            documents[start : start + _BLOCK] = own
            done = np.cumsum(lengths[own], dtype=np.int64) + tokens
            ends[start : start + _BLOCK] = done
            tokens = int(done[-1])
        return cls(documents=documents, ends=ends)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the stream."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def pieces(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield the reads (document, offset, length) that return tokens [start, start + count)."""
        position = int(np.searchsorted(self.ends, start, side="right"))
        stop = start + count
        while start < stop:
            end = int(self.ends[position])
            begin = int(self.ends[position - 1]) if position else 0
            length = min(end, stop) - start
            if length:
                yield int(self.documents[position]), start - begin, length
            start += length
            position += 1
