"""Mixtures of data sets that continue when sources or shares change."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast

import numpy as np
from mt_files import Checks, RowField
from numpy.typing import NDArray

from mt_data.datasets.batch import Packing
from mt_data.datasets.blend import BlendOrder, ChosenSamples, Order, SplitOrder, order_of
from mt_data.datasets.gpt import GPTDataset
from mt_data.datasets.row_dataset import RowDataset, check_equal_rows
from mt_data.error import DataError

Dataset: TypeAlias = GPTDataset | RowDataset


@dataclass(frozen=True, kw_only=True)
class MixtureSource:
    """One data set in a mixture.

    Attributes:
        fingerprint: Digest of the tokens and their order.
        weight: Share of the mixture; the shares sum to 1. A source of share 0 gives no samples.
        start: Number of its samples that the run took before this mixture began.
    """

    fingerprint: str
    weight: float
    start: int = 0

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(0, "weight", "start")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Data sets of a run and their shares, from some sample on.

    When sources or shares change, a new mixture begins: each source that stays, or comes back,
    continues at its next sample; a new source starts at its first sample. So no sample is repeated
    before the epoch of its source ends.

    Attributes:
        start: Number of the run's samples before this mixture.
        sources: Data sets in the mixture.
        resting: Former data sets; `start` is the sample where each would continue.
        order: Order of the sources' samples; `shortfall` in checkpoints without this field.
    """

    start: int = 0
    sources: tuple[MixtureSource, ...]
    resting: tuple[MixtureSource, ...] = ()
    order: Literal["split", "shortfall"] = "shortfall"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(0, "start")
        if not self.sources:
            checks.add("sources", "empty; at least one data set is needed")
        elif not any(self.drawn):
            checks.add("sources", "all have share 0; at least one has to give samples")
        elif self.order == "shortfall" and not all(self.drawn):
            checks.add("order", "shortfall needs shares above 0; use split")
        checks.done()

    @property
    def drawn(self) -> tuple[bool, ...]:
        """Whether each source gives samples."""
        return tuple(source.weight > 0 for source in self.sources)

    @property
    def choice(self) -> SplitOrder | BlendOrder:
        """The source of each sample, numbered among the sources that give samples."""
        return order_of(self.order, [s.weight for s in self.sources if s.weight > 0])

    def taken(self, samples: int) -> tuple[int, ...]:
        """Count the samples of each source among the first `samples` of the run."""
        return self.counted(self.choice.counts(samples - self.start))

    def counted(self, counts: NDArray[np.int64]) -> tuple[int, ...]:
        """Return the samples of each source: `start`, plus its count if it gives samples."""
        own = iter(counts.tolist())
        return tuple(
            source.start + (next(own) if is_drawn else 0)
            for source, is_drawn in zip(self.sources, self.drawn, strict=True)
        )

    def continued(
        self, sources: Sequence[MixtureSource], samples: int, order: Order = "split"
    ) -> Mixture:
        """Return the mixture from `samples` on: this one, or the next if the sources changed.

        Args:
            sources: The data sets from here on.
            samples: Number of the run's samples so far.
            order: Order of the next mixture; this one keeps its own.
        """
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
        resting = tuple(known)
        return Mixture(start=samples, sources=tuple(chosen), resting=resting, order=order)


class MixedSamples(ChosenSamples):
    """The samples of a run by their number since its start.

    Args:
        datasets: Data sets, in the order of the mixture's sources.
        mixture: Mixture since the last change of sources.
        num_samples: Number of samples in the whole run.
        later: Following mixtures of the same data sets, ordered by their `start`.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        mixture: Mixture,
        *,
        num_samples: int,
        later: Sequence[Mixture] = (),
    ) -> None:
        # Of `MixedRows` they make rows instead.
        super().__init__(cast("Sequence[GPTDataset]", datasets), num_samples)
        self.mixtures = (mixture, *later)
        for each in self.mixtures:
            if len(each.sources) != len(datasets):
                text = f"a mixture of {len(each.sources)} sources for {len(datasets)} data sets"
                raise DataError(f"{text}; give one source for each")
        self._starts = [each.start for each in self.mixtures]
        if self._starts != sorted(self._starts):
            raise DataError(f"mixtures start at samples {self._starts}; give them in that order")
        self._choices = [each.choice for each in self.mixtures]
        self._drawn = [
            [number for number, is_drawn in enumerate(each.drawn) if is_drawn]
            for each in self.mixtures
        ]

    def origin(self, index: int) -> tuple[int, int]:
        """Return the number of a sample's data set, and the sample's number there."""
        at = self._at(index)
        mixture = self.mixtures[at]
        chosen, number = self._choices[at](index - mixture.start)
        source = self._drawn[at][chosen]
        return source, mixture.sources[source].start + number

    def mixture_at(self, samples: int) -> Mixture:
        """Return the mixture that holds after `samples` samples of the run."""
        return self.mixtures[self._at(samples)]

    def taken(self, samples: int) -> tuple[int, ...]:
        """Return the number of samples of each data set among the run's first `samples`."""
        at = self._at(samples)
        return self.mixtures[at].counted(self._choices[at].counts(samples - self._starts[at]))

    def _at(self, samples: int) -> int:
        return max(0, bisect_right(self._starts, samples) - 1)


class MixedRows(MixedSamples):
    """Rows of a run from data sets that make inputs and labels themselves.

    Raises:
        DataError: Rows of the data sets differ in their fields or sizes.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        mixture: Mixture,
        *,
        num_samples: int,
        later: Sequence[Mixture] = (),
    ) -> None:
        super().__init__(datasets, mixture, num_samples=num_samples, later=later)
        self._rows = cast("Sequence[RowDataset]", datasets)
        check_equal_rows(self._rows)

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        return self._rows[0].sequence_length

    @property
    def packing(self) -> Packing:
        """Whether the rows have several documents."""
        return self._rows[0].packing

    @property
    def fields(self) -> tuple[RowField, ...]:
        """The arrays of a row."""
        return self._rows[0].fields

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of each dim that `fields` name."""
        return self._rows[0].sizes

    def row(self, index: int) -> Mapping[str, NDArray]:
        """Return the arrays of a row."""
        source, number = self.origin(index)
        return self._rows[source].row(number)

    def empty(self) -> Mapping[str, NDArray]:
        """Return a row without labels."""
        return self._rows[0].empty()


def mixed(
    datasets: Sequence[Dataset],
    mixture: Mixture,
    *,
    num_samples: int,
    later: Sequence[Mixture] = (),
) -> MixedSamples:
    """Return the samples of a run, or its rows if the data sets make rows themselves."""
    kind = MixedRows if isinstance(datasets[0], RowDataset) else MixedSamples
    return kind(datasets, mixture, num_samples=num_samples, later=later)


def mixture_sources(
    datasets: Sequence[Dataset], weights: Sequence[float]
) -> tuple[MixtureSource, ...]:
    """Describe data sets of a mixture; without weights their shares follow their tokens."""
    shares = weights or [float(dataset.num_tokens) for dataset in datasets]
    total = sum(shares)
    return tuple(
        MixtureSource(fingerprint=dataset.fingerprint, weight=share / total)
        for dataset, share in zip(datasets, shares, strict=True)
    )
