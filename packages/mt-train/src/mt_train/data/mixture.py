"""Which samples a run trains on, from one source or several, whatever changes on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import numpy as np
from mt_data import BlendOrder, GPTDataset, MaskedDataset, SpanDataset
from mt_files import Checks
from numpy.typing import NDArray

Made: TypeAlias = SpanDataset | MaskedDataset
"""A data set that makes inputs and labels itself."""
Dataset: TypeAlias = GPTDataset | Made


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
        order = BlendOrder([source.weight for source in self.sources])
        counts = order.counts(samples - self.start)
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

    def __init__(self, datasets: Sequence[Dataset], mixture: Mixture, *, num_samples: int) -> None:
        self._datasets, self._mixture, self._length = tuple(datasets), mixture, num_samples
        self._order = BlendOrder([source.weight for source in mixture.sources])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self.sample(index)

    def sample(self, index: int, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Return tokens [begin, end) of a sample."""
        dataset, number = self._place(index)
        return cast("GPTDataset", dataset).sample(number, begin, end)

    def sample_documents(self, index: int) -> NDArray[np.int64]:
        """Return the number of the document of each token of a sample."""
        dataset, number = self._place(index)
        return cast("GPTDataset", dataset).sample_documents(number)

    def _place(self, index: int) -> tuple[Dataset, int]:
        """Return the data set of a sample, and its number there; there is no end."""
        source, number = self._order(index - self._mixture.start)
        return self._datasets[source], self._mixture.sources[source].start + number


class MixedRows(MixedSamples):
    """The same of data sets that make inputs and labels themselves (`Made`)."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        return self._datasets[0].sequence_length

    def row(self, index: int) -> Mapping[str, NDArray]:
        """Return the arrays of a row."""
        dataset, number = self._place(index)
        return cast("Made", dataset).row(number)

    def empty(self) -> Mapping[str, NDArray]:
        """Return a row without labels."""
        return cast("Made", self._datasets[0]).empty()


def sources_of(datasets: Sequence[Dataset], weights: Sequence[float]) -> tuple[Source, ...]:
    """Describe data sets that are to be mixed; without weights they count by their tokens."""
    shares = weights or [float(dataset.indexed.lengths.sum()) for dataset in datasets]
    total = sum(shares)
    return tuple(
        Source(fingerprint=dataset.fingerprint, weight=share / total)
        for dataset, share in zip(datasets, shares, strict=True)
    )
