"""Samples of a data set in shards, of which the later ones may still be in the making."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from mt_data.datasets.gpt import GPTDataset
from mt_data.datasets.identity import digest_of
from mt_data.datasets.order import sample_count
from mt_data.datasets.permutation import Permutation
from mt_data.error import DataError, at_least
from mt_data.storage.indexed import IndexedDataset

_OPEN = 3  # a batch spans two shards, and the next one is read ahead


class ShardedDataset:
    """Samples of shards, one shard after the other.

    The first epoch has the shards in their order, so that its beginning needs the first ones alone;
    later epochs have them in an order of the key (seed, epoch). Within a shard an epoch's samples
    have the order of a `GPTDataset`. So a sample is a function of the finished shards and its
    number, whichever of them are there when it is asked for, and one shard alone gives the samples
    of its `GPTDataset`.

    Args:
        open: Function that returns the tokens of a shard, 0 or more, and waits for them where they
            are not there yet.
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
        at_least(1, count=count, sequence_length=sequence_length)
        self.sequence_length, self.num_tokens = sequence_length, num_tokens
        self._open, self._samples = open, samples
        self._count, self._seed, self._identity = count, seed, identity
        self._sizes: list[int] = []  # samples in an epoch of each shard that is known
        self._ends: list[int] = []  # their sums
        self._kept: OrderedDict[int, GPTDataset] = OrderedDict()
        self._later: tuple[int, Sequence[int], list[int]] = (0, (), [])

    @property
    def fingerprint(self) -> str:
        """Digest of the source and of everything that decides the order."""
        how = [self._count, self.sequence_length, self._seed]
        return digest_of({"shards": self._identity, "order": how})

    def sample(self, index: int, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Return tokens [begin, end) of sample `index` in the endless stream of epochs."""
        shard, number = self._find(index)
        return self._shard(shard).sample(number, begin, end)

    def sample_documents(self, index: int) -> NDArray[np.int64]:
        """Return the document number of each token of a sample, from 0."""
        shard, number = self._find(index)
        return self._shard(shard).sample_documents(number)

    def _find(self, index: int) -> tuple[int, int]:
        """Return the shard of a sample, and the sample's number there."""
        if index < 0:
            raise IndexError(f"sample {index} does not exist; an index is 0 or more")
        while len(self._ends) < self._count and (not self._ends or index >= self._ends[-1]):
            self._measure(len(self._ends))
        total = self._ends[-1]
        if not total:
            raise DataError(
                f"none of {self._count} shards holds one sample of {self.sequence_length + 1} "
                "tokens; use longer documents or a shorter sequence_length"
            )
        epoch, rank = (0, index) if index < total else divmod(index, total)
        order, ends = self._epoch(epoch)
        place = bisect_right(ends, rank)
        shard, before = order[place], ends[place - 1] if place else 0
        return shard, epoch * self._sizes[shard] + rank - before

    def _epoch(self, epoch: int) -> tuple[Sequence[int], list[int]]:
        """Return the shards of an epoch in order, and the number of samples up to each one's end.

        In the first epoch only shards that are known.
        """
        if epoch == 0:
            return range(len(self._sizes)), self._ends
        if self._later[0] != epoch:
            shuffle = Permutation(self._count, self._seed, epoch, "shards")
            order = [shuffle(place) for place in range(self._count)]
            self._later = epoch, order, list(accumulate(self._sizes[shard] for shard in order))
        return self._later[1:]

    def _measure(self, shard: int) -> None:
        """Count the samples of the next shard."""
        tokens = self._open(shard)
        count = sample_count(tokens.num_tokens, self.sequence_length, keep_tail=False)
        if count:
            self._keep(shard, tokens)
        self._sizes.append(count)
        self._ends.append(count + (self._ends[-1] if self._ends else 0))

    def _shard(self, shard: int) -> GPTDataset:
        if shard not in self._kept:
            self._keep(shard, self._open(shard))
        self._kept.move_to_end(shard)
        return self._kept[shard]

    def _keep(self, shard: int, tokens: IndexedDataset) -> None:
        self._kept[shard] = self._samples(
            tokens, sequence_length=self.sequence_length, seed=self._seed
        )
        if len(self._kept) > _OPEN:
            self._kept.popitem(last=False)
