"""Mixing datasets in fixed proportions."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Literal, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mt_data.datasets.batch import PartialSamples
from mt_data.datasets.identity import digest_of
from mt_data.error import DataError

BLOCK = 1 << 12
MAX_DATASETS = 2**15 - 1
_ONE = 1 << 62
_Node: TypeAlias = "int | tuple[int, _Node, _Node]"

Order: TypeAlias = Literal["split", "shortfall"]


class SampleSource(PartialSamples, Protocol):
    """A dataset that can be blended; `sample(i)` must work for any i >= 0."""

    @property
    def fingerprint(self) -> str:
        """Digest that changes if the samples change."""
        ...


def _shares(weights: ArrayLike) -> NDArray[np.float64]:
    """Return weights that sum to 1.

    Raises:
        DataError: There are no weights or too many, or a weight is not above 0.
    """
    shares = np.asarray(weights, np.float64)
    if shares.ndim != 1 or not 1 <= len(shares) <= MAX_DATASETS:
        raise DataError(f"a blend needs 1 to {MAX_DATASETS} weights, got shape {shares.shape}")
    if not (np.isfinite(shares).all() and (shares > 0).all()):
        at = int(np.argmin(np.isfinite(shares) & (shares > 0)))
        raise DataError(
            f"weight {at} is {shares[at]}; weights must be finite and above 0 "
            "(leave the dataset out instead)"
        )
    return shares / shares.sum()


class SplitOrder:
    """The dataset of each sample of a blend, found without the choices of earlier samples.

    The datasets are the leaves of a Huffman tree of their weights. Of the first m samples of a
    node, its lighter branch has `round(m * share)`: so a sample's way to its leaf, and its number
    there, take one product for each node on the way. After n samples the count of a dataset with
    weight w differs from n * w by at most half the sum of w / W over the nodes of its way below the
    root, W being a node's weight: less than 1.7, and mostly less than 1. Everything is integer
    arithmetic, so it is the same on every machine.

    Args:
        weights: [D] shares, normalised here.
    """

    def __init__(self, weights: ArrayLike) -> None:
        self.weights = _shares(weights)
        # A node is (numerator of the lighter branch's share, lighter branch, heavier branch).
        heap: list[tuple[float, int, _Node]] = [
            (weight, number, number) for number, weight in enumerate(self.weights.tolist())
        ]
        heapify(heap)
        for joined in range(len(heap), 2 * len(heap) - 1):
            light, _, lighter = heappop(heap)
            heavy, _, heavier = heappop(heap)
            share = min(max(round(light / (light + heavy) * _ONE), 1), _ONE - 1)
            heappush(heap, (light + heavy, joined, (share, lighter, heavier)))
        self._root = heap[0][2]

    def __call__(self, index: int) -> tuple[int, int]:
        """Return (dataset, sample in that dataset) of sample `index`."""
        node = self._root
        while not isinstance(node, int):
            share, lighter, heavier = node
            before = _part(index, share)
            if _part(index + 1, share) > before:
                node, index = lighter, before
            else:
                node, index = heavier, index - before
        return node, index

    def counts(self, size: int) -> NDArray[np.int64]:
        """Return the number of samples of each dataset among the first `size`, [D]."""
        found = np.zeros(len(self.weights), np.int64)
        rest: list[tuple[_Node, int]] = [(self._root, size)]
        while rest:
            node, count = rest.pop()
            if isinstance(node, int):
                found[node] = count
            else:
                part = _part(count, node[0])
                rest += [(node[1], part), (node[2], count - part)]
        return found


def _part(count: int, share: int) -> int:
    """Return the share of a count, rounded."""
    return (2 * count * share + _ONE) // (2 * _ONE)


class BlendOrder:
    """The dataset of each sample of a blend, chosen by the largest shortfall.

    With weights w (summing to 1) and n_d samples taken from dataset d before sample t, the next
    dataset is the one with the largest w_d * max(t, 1) - n_d, the first of equals. After any number
    of samples each dataset is within about one sample of its share. This is Megatron-LM's rule.

    Blocks of choices are computed on first use, at about 3 us for each sample, and kept at 2 bytes
    for each sample.

    Args:
        weights: [D] shares, normalised here.
    """

    def __init__(self, weights: ArrayLike) -> None:
        self.weights = _shares(weights)
        self._is_plain = len(self.weights) == 1  # there is no choice to remember
        self._blocks: list[NDArray[np.int16]] = []
        self._taken: list[NDArray[np.int64]] = [np.zeros(len(self.weights), np.int64)]

    def __call__(self, index: int) -> tuple[int, int]:
        """Return (dataset, sample in that dataset) of sample `index`."""
        if self._is_plain:
            return 0, index
        block, rank = divmod(index, BLOCK)
        while len(self._blocks) <= block:
            self._extend()
        choices = self._blocks[block]
        dataset = int(choices[rank])
        before = int(np.count_nonzero(choices[:rank] == dataset))
        return dataset, int(self._taken[block][dataset]) + before

    def counts(self, size: int) -> NDArray[np.int64]:
        """Return the number of samples of each dataset among the first `size`, [D]."""
        if self._is_plain:
            return np.array([size])
        block, rank = divmod(size, BLOCK)
        while len(self._blocks) <= block:
            self._extend()
        part = np.bincount(self._blocks[block][:rank], minlength=len(self.weights))
        return self._taken[block] + part

    def _extend(self) -> None:
        start = len(self._blocks) * BLOCK
        taken = self._taken[-1].copy()
        choices = np.empty(BLOCK, np.int16)
        shortfall = np.empty_like(self.weights)
        for step in range(len(choices)):
            np.multiply(self.weights, max(start + step, 1), out=shortfall)
            np.subtract(shortfall, taken, out=shortfall)
            dataset = shortfall.argmax()
            taken[dataset] += 1
            choices[step] = dataset
        self._blocks.append(choices)
        self._taken.append(taken)


def order_of(name: Order, weights: ArrayLike) -> SplitOrder | BlendOrder:
    """Return the order of a blend.

    Raises:
        DataError: The name or a weight is wrong.
    """
    if name not in get_args(Order):
        raise DataError(f"order is {name!r}; choose 'split' or 'shortfall'")
    return SplitOrder(weights) if name == "split" else BlendOrder(weights)


class ChosenSamples(ABC):
    """Samples drawn from several data sets.

    Args:
        datasets: At least one data set.
        num_samples: `len` of the result.

    Shape:
        - `dataset[i]`: the shape of the data sets' samples.
    """

    def __init__(self, datasets: Sequence[SampleSource], num_samples: int) -> None:
        if not datasets:
            raise DataError("a blend needs at least one dataset")
        if num_samples < 1:
            raise DataError(f"num_samples is {num_samples}; a blend needs at least 1")
        self.datasets = tuple(datasets)
        self._length = num_samples

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} does not exist; the blend has {len(self)}")
        return self.sample(index % len(self))

    def sample(self, index: int, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Return a sample; the blend continues past `len`."""
        dataset, position = self.origin(index)
        if begin == 0 and end is None:  # some datasets have whole samples only
            return self.datasets[dataset].sample(position)
        return self.datasets[dataset].sample(position, begin, end)

    def sample_documents(self, index: int) -> NDArray[np.int64]:
        """Return the document number of each token of a sample."""
        dataset, position = self.origin(index)
        return self.datasets[dataset].sample_documents(position)

    @abstractmethod
    def origin(self, index: int) -> tuple[int, int]:
        """Return (dataset, sample in that dataset) of sample `index`."""


class BlendedDataset(ChosenSamples):
    """Draw samples from several datasets in fixed proportions.

    A dataset continues with its next epoch after its `len`.

    Args:
        datasets: At least one dataset.
        weights: Share of each dataset.
        num_samples: `len` of the blend.
        order: `split` finds any sample at once (`SplitOrder`); `shortfall` is Megatron-LM's rule,
            which must choose all earlier samples first (`BlendOrder`).
    """

    def __init__(
        self,
        datasets: Sequence[SampleSource],
        weights: Sequence[float],
        num_samples: int,
        *,
        order: Order = "shortfall",
    ) -> None:
        super().__init__(datasets, num_samples)
        if len(weights) != len(datasets):
            raise DataError(f"{len(weights)} weights for {len(datasets)} datasets")
        self._order = order_of(order, weights)
        self._rule: Order = order

    @property
    def weights(self) -> NDArray[np.float64]:
        """Shares of the datasets, summing to 1."""
        return self._order.weights

    @property
    def fingerprint(self) -> str:
        """Digest of the datasets and their shares."""
        sources = [dataset.fingerprint for dataset in self.datasets]
        rule = [] if self._rule == "shortfall" else [self._rule]
        return digest_of([sources, self.weights.tolist(), *rule])

    def origin(self, index: int) -> tuple[int, int]:
        """Return (dataset, sample in that dataset) of sample `index`."""
        return self._order(index)
