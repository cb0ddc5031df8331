"""The sources of a run's samples, and the number of samples from each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
from mt_data import (
    MixedRows,
    MixedSamples,
    Mixture,
    MixtureSource,
    RowDataset,
    mixed,
    mixture_sources,
)

from mt_train.config.kinds.section import Sources
from mt_train.config.run_config import RunConfig
from mt_train.reporting.metrics import Record
from mt_train.session.starting import Start

_MOST_NAMED = 12


class Drawing:
    """The samples of a run, from sources with changing shares.

    Args:
        config: The run.
        sources: Sources of its rows.
        start: Starting point of the run.
    """

    def __init__(self, config: RunConfig, sources: Sources, start: Start) -> None:
        data, training = config.data, config.training
        datasets = data.datasets(sources)
        shares = data.shares(training.sequence_length)
        known = mixture_sources(datasets, shares[0][1])  # digests of data, which are made once
        phases = [(begin, _shared(known, weights)) for begin, weights in shares]
        first, *later = start.mixtures(phases, data.blend_order)
        steps_left = max(0, training.steps - start.progress.step)
        self.num_samples = start.progress.samples + steps_left * training.global_batch_size
        self.samples: MixedSamples = mixed(
            datasets, first, num_samples=self.num_samples, later=later
        )
        self.names = source_names(sources.train)
        self._images, self._batch = sources.model.images, training
        rows = [each.describe() if isinstance(each, RowDataset) else "" for each in datasets]
        self._rows = [f"{n}: {text}" for n, text in zip(self.names, rows, strict=True) if text]

    def mixture(self, samples: int) -> Mixture:
        """Return the mixture after `samples` samples of the run, for a checkpoint."""
        return self.samples.mixture_at(samples)

    def record(self, samples: int) -> Record:
        """Return the number of samples of each source among the first `samples` of the run.

        The record is empty if there is one source.
        """
        if len(self.names) == 1:
            return {}
        taken = self.samples.taken(samples)
        return {f"samples/{name}": count for name, count in zip(self.names, taken, strict=True)}

    def by_rank(self, before: int, ranks: int) -> Record:
        """Return the images and tokens of each data-parallel rank at the step after `before`.

        The record is empty if the model takes no images.
        """
        how, batch, found = self._images, self._batch, {}
        if how is None:
            return found
        samples = cast("MixedRows", self.samples)  # images come in rows
        numbers = np.arange(before, before + batch.global_batch_size)
        for rank, own in enumerate(
            numbers.reshape(-1, ranks, batch.micro_batch_size).swapaxes(0, 1)
        ):
            rows = [samples.row(number)["tokens"] for number in own.ravel().tolist()]
            images = sum(np.count_nonzero(row == how.token_id) for row in rows)
            found[f"images/rank{rank}"] = int(images) // how.num_tokens
            found[f"tokens/rank{rank}"] = sum(len(np.trim_zeros(row, "b")) for row in rows)
        return found

    def changes(self, before: int, samples: int) -> list[str]:
        """Return a line on each phase that begins after sample `before` and up to `samples`."""
        found = self.samples.mixtures[1:]
        return [self._described(each) for each in found if before < each.start <= samples]

    def lines(self, samples: int) -> list[str]:
        """Return lines on the rows, and for a run with phases on the shares after `samples`."""
        has_phases = len(self.samples.mixtures) > 1
        return [*self._rows, *([self._described(self.mixture(samples))] if has_phases else [])]

    def summary(self, samples: int) -> list[str]:
        """Return a line on the samples of each source, if there are several."""
        taken = zip(self.names, self.samples.taken(samples), strict=True)
        given = [f"{name} {count}" for name, count in taken]
        return [f"samples so far: {_listed(given)}"] if len(given) > 1 else []

    def _described(self, mixture: Mixture) -> str:
        shares = [
            f"{name} {source.weight:.3g}"
            for name, source in zip(self.names, mixture.sources, strict=True)
            if source.weight
        ]
        return f"shares from sample {mixture.start} on: {_listed(shares)}"


def _shared(
    sources: tuple[MixtureSource, ...], weights: Sequence[float]
) -> tuple[MixtureSource, ...]:
    """Return sources with new shares; without weights, with their current shares."""
    total = sum(weights)
    pairs = zip(sources, weights, strict=True) if weights else ()
    return tuple(replace(each, weight=weight / total) for each, weight in pairs) or sources


def source_names(paths: Sequence[Path]) -> list[str]:
    """Return the ends of paths, with enough parts to make them differ."""
    parts = [path.parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name}#{number}" for number, path in enumerate(paths)]  # one is listed twice


def _listed(parts: Sequence[str]) -> str:
    more = len(parts) - _MOST_NAMED
    return ", ".join(parts[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
