"""Traces of a few steps, and the history of a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from mt_model import ModelConfig
from mt_parallel_state import ParallelLayout
from torch.profiler import ProfilerActivity, profile, record_function

from mt_train.config.run_config import RunConfig
from mt_train.parts.part import Setup, TrainerPart
from mt_train.reporting.metrics import Record

if TYPE_CHECKING:
    from mt_train.config.loading import LoadedConfig

_MOST_MEMORY_EVENTS = 1 << 20


class Profiling(TrainerPart):
    """A trace of the steps of `training.profile` on the ranks that it names.

    The trainer and the pipeline name their sections (`data`, `forward`, `backward`, `messages`,
    `gradients`, `agreement`, `optimizer`), and this part names each `step`. A run that ends
    earlier, also with an error, writes the trace of the completed steps.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        section = setup.config.training.profile
        assert section is not None, "is_wanted looked"  # noqa: S101
        self._first, self._last = section.steps
        self._is_traced = setup.state.rank in section.ranks
        self._on_gpu = setup.state.device.type == "cuda"
        self._profile: profile | None = None
        self._step: record_function | None = None
        self._written: list[Path] = []

    @staticmethod
    def is_wanted(config: RunConfig) -> bool:
        """Return whether steps are to be traced."""
        return config.training.profile is not None

    @staticmethod
    def check_layout(loaded: LoadedConfig, model: ModelConfig, layout: ParallelLayout) -> None:
        """Check that the ranks exist."""
        section = loaded.config.training.profile
        if section is not None and max(section.ranks) >= layout.world_size:
            text = f"{max(section.ranks)} is no rank of {layout.world_size}; the last is "
            raise loaded.error("training.profile.ranks", f"{text}{layout.world_size - 1}")

    def begin_step(self, step: int) -> None:
        """Start the trace with its first step."""
        if not self._is_traced or not self._first <= step + 1 <= self._last:
            return
        if self._profile is None:
            activities = [ProfilerActivity.CPU]
            if self._on_gpu:
                activities.append(ProfilerActivity.CUDA)
                torch.cuda.memory._record_memory_history(max_entries=_MOST_MEMORY_EVENTS)
            self._profile = profile(activities=activities)
            self._profile.start()
        self._step = record_function("step")
        self._step.__enter__()

    def record(self, sums: Sequence[float], so_far: Record) -> Record:
        """End the step, and the trace after its last one."""
        del sums
        self._end_step()
        if so_far["step"] == self._last:
            self.close()
        return {}

    def notes(self, record: Record) -> Iterator[str]:
        """Yield the written files."""
        del record
        written, self._written = self._written, []
        return (f"wrote {path}" for path in written)

    def close(self) -> None:
        """Write the trace, if one is under way."""
        self._end_step()
        found, self._profile = self._profile, None
        if found is None:
            return
        found.stop()
        folder = self.setup.folder / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank_{self.setup.state.rank}_steps_{self._first}_to_{self._last}"
        self._written.append(folder / f"{name}.json")
        found.export_chrome_trace(str(self._written[-1]))
        if self._on_gpu:
            self._written.append(folder / f"{name}_memory.pickle")
            torch.cuda.memory._dump_snapshot(str(self._written[-1]))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)
