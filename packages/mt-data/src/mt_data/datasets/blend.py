"""Mixing datasets in fixed proportions."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mt_data.datasets.batch import PartialSamples
from mt_data.datasets.identity import digest_of
from mt_data.error import DataError

BLOCK = 1 << 12
MAX_DATASETS = 2**15 - 1


class SampleSource(PartialSamples, Protocol):
    """A dataset that can be blended; `sample(i)` must work for any i >= 0."""

    @property
    def fingerprint(self) -> str:
        """Digest that changes if the samples change."""
        ...


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
        shares = np.asarray(weights, np.float64)
        if shares.ndim != 1 or not 1 <= len(shares) <= MAX_DATASETS:
            raise DataError(f"a blend needs 1 to {MAX_DATASETS} weights, got shape {shares.shape}")
        if not (np.isfinite(shares).all() and (shares > 0).all()):
            at = int(np.argmin(np.isfinite(shares) & (shares > 0)))
            raise DataError(
                f"weight {at} is {shares[at]}; weights must be finite and above 0 "
                "(leave the dataset out instead)"
            )
        self.weights = shares / shares.sum()
        self._is_plain = len(shares) == 1  # there is no choice to remember
        self._blocks: list[NDArray[np.int16]] = []
        self._taken: list[NDArray[np.int64]] = [np.zeros(len(shares), np.int64)]

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


class BlendedDataset:
    """Draw samples from several datasets in fixed proportions.

    A dataset continues with its next epoch after its `len`.

    Args:
        datasets: At least one dataset.
        weights: Share of each dataset.
        num_samples: `len` of the blend.

    Shape:
        - `dataset[i]`: the shape of the blended datasets' samples.
    """

    def __init__(
        self,
        datasets: Sequence[SampleSource],
        weights: Sequence[float],
        num_samples: int,
    ) -> None:
        if not datasets:
            raise DataError("a blend needs at least one dataset")
        if len(weights) != len(datasets):
            raise DataError(f"{len(weights)} weights for {len(datasets)} datasets")
        if num_samples < 1:
            raise DataError(f"num_samples is {num_samples}; a blend needs at least 1")
        self._order = BlendOrder(weights)
        self.datasets = tuple(datasets)
        self._length = num_samples

    @property
    def weights(self) -> NDArray[np.float64]:
        """Shares of the datasets, summing to 1."""
        return self._order.weights

    @property
    def fingerprint(self) -> str:
        """Digest of the datasets and their shares."""
        sources = [dataset.fingerprint for dataset in self.datasets]
        return digest_of([sources, self.weights.tolist()])

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

    def origin(self, index: int) -> tuple[int, int]:
        """Return (dataset, sample in that dataset) of sample `index`."""
        return self._order(index)
