"""Samples of a data set in shards; later shards may still be unfinished."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np
from mt_files import RowField
from numpy.typing import NDArray

from mt_data.datasets.gpt import GPTDataset
from mt_data.datasets.identity import digest_of
from mt_data.datasets.order import sample_count
from mt_data.datasets.permutation import Permutation
from mt_data.datasets.row_dataset import RowDataset
from mt_data.error import DataError, at_least
from mt_data.storage.indexed import IndexedDataset

T = TypeVar("T")
_OPEN = 3  # a batch spans two shards, and the next one is read ahead


class ShardOrder(Generic[T]):
    """The order of the samples of shards, one shard after the other.

    The first epoch has the shards in their order, so that its beginning needs only the first
    shards; the key (seed, epoch) decides the order of later epochs.

    Args:
        open: Function that returns the data set of a shard, numbered from 0, and the number of its
            samples in an epoch. It waits for an unfinished shard.
        count: Number of shards.
        seed: Seed of the order.
    """

    def __init__(self, open: Callable[[int], tuple[T, int]], *, count: int, seed: int) -> None:
        at_least(1, count=count)
        self._open, self._count, self._seed = open, count, seed
        self._sizes: list[int] = []  # samples in an epoch of each known shard
        self._ends: list[int] = []  # their sums
        self._kept: OrderedDict[int, T] = OrderedDict()
        self._later: tuple[int, Sequence[int], list[int]] = (0, (), [])

    @property
    def num_samples(self) -> int:
        """Number of samples in an epoch; needs all shards."""
        while len(self._ends) < self._count:
            self._shard(len(self._ends))
        return self._ends[-1]

    def find(self, index: int) -> tuple[T, int]:
        """Return the data set of the shard with sample `index`, and the sample's number there."""
        if index < 0:
            raise IndexError(f"sample {index} does not exist; an index is 0 or more")
        while len(self._ends) < self._count and (not self._ends or index >= self._ends[-1]):
            self._shard(len(self._ends))
        total = self._ends[-1]
        if not total:
            raise DataError(
                f"none of {self._count} shards holds one sample; use longer documents or a shorter "
                "sequence_length"
            )
        epoch, rank = (0, index) if index < total else divmod(index, total)
        order, ends = self._epoch(epoch)
        place = bisect_right(ends, rank)
        shard, before = order[place], ends[place - 1] if place else 0
        return self._shard(shard), epoch * self._sizes[shard] + rank - before

    def _epoch(self, epoch: int) -> tuple[Sequence[int], list[int]]:
        """Return the shards of an epoch in order, and the number of samples up to each shard's end.

        The first epoch has the known shards.
        """
        if epoch == 0:
            return range(len(self._sizes)), self._ends
        if self._later[0] != epoch:
            shuffle = Permutation(self._count, self._seed, epoch, "shards")
            order = [shuffle(place) for place in range(self._count)]
            self._later = epoch, order, list(accumulate(self._sizes[shard] for shard in order))
        return self._later[1:]

    def _shard(self, shard: int) -> T:
        """Return the data set of a known shard, or of the next one."""
        if shard not in self._kept:
            self._kept[shard], size = self._open(shard)
            if shard == len(self._sizes):
                self._sizes.append(size)
                self._ends.append(size + (self._ends[-1] if self._ends else 0))
            if len(self._kept) > _OPEN:
                self._kept.popitem(last=False)
        self._kept.move_to_end(shard)
        return self._kept[shard]


class ShardedDataset:
    """Samples of running text in shards, one shard after the other.

    Within a shard an epoch's samples have the order of a `GPTDataset`. So a sample is a function of
    the finished shards and its number, independent of the moment of the read, and a single shard
    gives the samples of its `GPTDataset`. See `ShardOrder`.

    Args:
        open: Function that returns the tokens of a shard, numbered from 0, and waits for an
            unfinished shard.
        samples: Function that makes the samples of a shard's tokens, such as `GPTDataset`, with
            the keywords `sequence_length` and `seed`.
        count: Number of shards.
        sequence_length: Number of tokens that a sample advances.
        seed: Seed of the order.
        identity: JSON values that name the source and how it is cut and tokenized.
        num_tokens: Share of the data set in a blend without weights, such as the source's size, as
            the number of tokens is known at the end only.

    Shape:
        - `sample(i)`: [sequence_length + 1] int64
    """

    def __init__(
        self,
        open: Callable[[int], IndexedDataset],
        samples: Callable[..., GPTDataset],
        *,
        count: int,
        sequence_length: int,
        seed: int,
        identity: object,
        num_tokens: int,
    ) -> None:
        at_least(1, sequence_length=sequence_length)

        def samples_of(shard: int) -> tuple[GPTDataset | None, int]:
            tokens = open(shard)
            size = sample_count(tokens.num_tokens, sequence_length, keep_tail=False)
            how = {"sequence_length": sequence_length, "seed": seed}
            return (samples(tokens, **how), size) if size else (None, 0)

        self.sequence_length, self.num_tokens = sequence_length, num_tokens
        self._order = ShardOrder(samples_of, count=count, seed=seed)
        self._identity = {"shards": identity, "order": [count, sequence_length, seed]}

    @property
    def fingerprint(self) -> str:
        """Digest of the source and of everything that decides the order."""
        return digest_of(self._identity)

    def sample(self, index: int, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Return tokens [begin, end) of sample `index` in the endless stream of epochs."""
        samples, number = self._find(index)
        return samples.sample(number, begin, end)

    def sample_documents(self, index: int) -> NDArray[np.int64]:
        """Return the document number of each token of a sample, from 0."""
        samples, number = self._find(index)
        return samples.sample_documents(number)

    def _find(self, index: int) -> tuple[GPTDataset, int]:
        samples, number = self._order.find(index)
        assert samples is not None, "a shard without samples has none to find"  # noqa: S101
        return samples, number


class ShardedRows(RowDataset):
    """Rows of shards, one shard after the other; see `ShardOrder`.

    Args:
        open: Function that returns the rows of a shard, numbered from 0, and waits for an
            unfinished shard. All shards have equal fields and sizes.
        count: Number of shards.
        seed: Seed of the order.
        identity: JSON values that name the source and how it is cut and tokenized.
        num_tokens: Share of the data set in a blend without weights, such as the source's size.
    """

    def __init__(
        self,
        open: Callable[[int], RowDataset],
        *,
        count: int,
        seed: int,
        identity: object,
        num_tokens: int,
    ) -> None:
        def rows_of(shard: int) -> tuple[RowDataset, int]:
            rows = open(shard)
            return rows, len(rows)

        self._order = ShardOrder(rows_of, count=count, seed=seed)
        self._first, _ = self._order.find(0)
        self.sequence_length, self.packing = self._first.sequence_length, self._first.packing
        self._num_tokens = num_tokens
        # The settings of the first shard's rows, such as masking, are the settings of all shards.
        self._identity = {
            "shards": identity,
            "order": [count, seed],
            "rows": self._first.fingerprint,
        }

    @property
    def fields(self) -> tuple[RowField, ...]:
        """The arrays of a row."""
        return self._first.fields

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of each dim that `fields` name."""
        return self._first.sizes

    @property
    def num_tokens(self) -> int:
        """Share of the data set in a blend without weights."""
        return self._num_tokens

    @property
    def fingerprint(self) -> str:
        """Digest of the source and of everything that decides the rows and their order."""
        return digest_of(self._identity)

    def __len__(self) -> int:
        return self._order.num_samples

    def row(self, index: int) -> Mapping[str, NDArray]:
        """Return the arrays of row `index` in the endless stream of epochs."""
        rows, number = self._order.find(index)
        return rows.row(number)
