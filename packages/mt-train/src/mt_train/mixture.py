"""Which samples a run trains on, from one source or several, whatever changes on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from mt_data import BlendedDataset, BlendOrder, GPTDataset
from mt_files import Checks
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Source:
    """One data set in a mixture.

    Attributes:
        fingerprint: Of its tokens and their order.
        weight: Its share; the shares sum to 1.
        start: Its samples that the run took before this mixture began.
    """

    fingerprint: str
    weight: float
    start: int = 0

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.above(0, "weight")
        checks.at_least(0, "start")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """What a run draws its samples from, since some point of it.

    When sources or shares change, a new mixture begins: each source that stays, or comes back, goes
    on where it was; a new one starts at its first sample. So nothing is repeated before its source
    is through.

    Attributes:
        start: Samples of the run before this mixture.
        sources: What is mixed.
        resting: What was mixed before; `start` is where it would go on.
    """

    start: int = 0
    sources: tuple[Source, ...]
    resting: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(0, "start")
        if not self.sources:
            checks.add("sources", "empty; at least one data set is needed")
        checks.done()

    def taken(self, samples: int) -> tuple[int, ...]:
        """Count the samples of each source that were taken when the run has seen `samples`."""
        here = samples - self.start
        if len(self.sources) == 1:
            return (self.sources[0].start + here,)
        counts = BlendOrder([source.weight for source in self.sources]).counts(here)
        return tuple(
            source.start + int(count) for source, count in zip(self.sources, counts, strict=True)
        )

    def continued(self, sources: Sequence[Source], samples: int) -> Mixture:
        """Return the mixture from `samples` on: this one, or the next if the sources changed."""
        if [(s.fingerprint, s.weight) for s in sources] == [
            (s.fingerprint, s.weight) for s in self.sources
        ]:
            return self
        taken = self.taken(samples)
        known = [replace(s, start=n) for s, n in zip(self.sources, taken, strict=True)]
        known += self.resting
        chosen = []
        for source in sources:
            same = next((s for s in known if s.fingerprint == source.fingerprint), None)
            if same is not None:
                known.remove(same)  # the same data set may be listed twice
            chosen.append(replace(source, start=0 if same is None else same.start))
        return Mixture(start=samples, sources=tuple(chosen), resting=tuple(known))


class MixedSamples:
    """The samples of a run by their number since its start.

    Args:
        datasets: As many as the mixture has sources.
        mixture: Since when, in which shares and from where in each.
        num_samples: Of the whole run.
    """

    def __init__(
        self, datasets: Sequence[GPTDataset], mixture: Mixture, *, num_samples: int
    ) -> None:
        self._start, self._length = mixture.start, num_samples
        parts = [
            _Rest(dataset, source.start)
            for dataset, source in zip(datasets, mixture.sources, strict=True)
        ]
        weights = [source.weight for source in mixture.sources]
        self._samples = (
            parts[0] if len(parts) == 1 else BlendedDataset(parts, weights, num_samples=1)
        )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self.sample(index)

    def sample(self, index: int, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Return tokens [begin, end) of a sample."""
        return self._samples.sample(index - self._start, begin, end)

    def sample_documents(self, index: int) -> NDArray[np.int64]:
        """Return the number of the document of each token of a sample."""
        return self._samples.sample_documents(index - self._start)


class _Rest:
    """A data set without its first samples."""

    def __init__(self, dataset: GPTDataset, start: int) -> None:
        self._dataset, self._start = dataset, start

    @property
    def fingerprint(self) -> str:
        """That of the whole."""
        return self._dataset.fingerprint

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self.sample(index)

    def sample(self, index: int, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Return tokens [begin, end) of sample `index` of the rest; there is no end."""
        return self._dataset.sample(self._start + index, begin, end)

    def sample_documents(self, index: int) -> NDArray[np.int64]:
        """Return the number of the document of each token of a sample."""
        return self._dataset.sample_documents(self._start + index)


def sources_of(datasets: Sequence[GPTDataset], weights: Sequence[float]) -> tuple[Source, ...]:
    """Describe data sets that are to be mixed; without weights they count by their tokens."""
    shares = weights or [float(dataset.indexed.lengths.sum()) for dataset in datasets]
    total = sum(shares)
    return tuple(
        Source(fingerprint=dataset.fingerprint, weight=share / total)
        for dataset, share in zip(datasets, shares, strict=True)
    )
