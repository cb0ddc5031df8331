"""Layers that torch.compile compiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mt_train.config.run_config import RunConfig
from mt_train.parts.part import Run, Setup, TrainerPart
from mt_train.reporting.metrics import Record


class Compilation(TrainerPart):
    """Compilation of each layer, with a report of the first step's duration."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._is_first = True

    @staticmethod
    def is_wanted(config: RunConfig) -> bool:
        """Return whether `training.compile` is set."""
        return config.training.compile

    def wrap(self, runs: list[Run]) -> list[Run]:
        """Have stages call their layers compiled."""
        for stage in self.setup.stages:
            stage.wrap_layers(torch.compile)
        return runs

    def record(self, sums: Sequence[float], so_far: Record) -> Record:
        """Return the seconds of the first step."""
        del sums
        was_first, self._is_first = self._is_first, False
        return {"first_step_seconds": so_far["seconds"]} if was_first else {}

    def notes(self, record: Record) -> Iterator[str]:
        """Yield the duration of the first step, on the first rank."""
        if "first_step_seconds" in record and self.setup.state.rank == 0:
            seconds = record["first_step_seconds"]
            yield f"the first step took {seconds:.1f} s, with compilation"
