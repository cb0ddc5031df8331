"""Metadata of a run's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from mt_ckpt import CheckpointError, SavedAdapters, SavedModel, SavedTokenizer, inspect_checkpoint
from mt_data import Mixture
from mt_files import Checks, UserError, to_plain
from mt_optim import ScaleState

from mt_train.config.kinds.registry import saved_data
from mt_train.config.run_config import RunConfig
from mt_train.training.progress import Progress

Saved = TypeVar("Saved", SavedModel, "SavedRun")
_SECTIONS = ("model", "data", "training")


class ResumeError(UserError):
    """A checkpoint does not belong to this configuration, or not to mt-train."""


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """The metadata of a checkpoint.

    The random numbers have no state of their own: each is a function of the seed in `config`, a
    name and a global index.

    Attributes:
        step: Completed steps.
        elapsed: Seconds spent in training steps.
        consumed_samples: Number of samples trained on.
        skipped_steps: Number of steps that changed no weight.
        loss_scale: State of the loss scale; null without one.
        data: Mixture of the run's data sets.
        tokenizer: Tokenizer of the data; null for token files without one.
        model: Model, from `ModelConfig.to_dict`.
        config: The sections of the configuration, as JSON values.
        plugins: SHA-256 of each plugin, by its path.
        adapters: Adapters, if the checkpoint holds only adapters of the model; else null.
    """

    step: int
    elapsed: float
    consumed_samples: int
    skipped_steps: int
    loss_scale: ScaleState | None
    data: Mixture
    tokenizer: SavedTokenizer | None
    model: Mapping[str, Any]
    config: Mapping[str, Mapping[str, Any]]
    plugins: Mapping[str, str] = field(default_factory=dict)
    adapters: SavedAdapters | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(0, "step", "elapsed", "consumed_samples", "skipped_steps")
        if not checks.errors:
            if self.data.start > self.consumed_samples:
                checks.add("data", f"starts after consumed_samples {self.consumed_samples}")
            if self.skipped_steps > self.step:
                checks.add("skipped_steps", f"are more than step {self.step}")
            for name in _SECTIONS:
                if name not in self.config:
                    checks.add("config", f"lacks {name}")
        checks.done()

    @property
    def tokenizer_sha256(self) -> str | None:
        """SHA-256 of the tokenizer, if there is one."""
        return None if self.tokenizer is None else self.tokenizer.sha256

    @property
    def progress(self) -> Progress:
        """The progress of the run."""
        return Progress(
            step=self.step,
            samples=self.consumed_samples,
            elapsed=self.elapsed,
            skipped=self.skipped_steps,
        )

    def at(self, progress: Progress, loss_scale: ScaleState | None) -> SavedRun:
        """Return the same run at another point."""
        return replace(
            self,
            step=progress.step,
            elapsed=progress.elapsed,
            consumed_samples=progress.samples,
            skipped_steps=progress.skipped,
            loss_scale=loss_scale,
        )

    def metadata(self, layout: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metadata for `read_saved`, with the layout that saves it, for the record."""
        return {**to_plain(self), "layout": dict(layout)}


def plain_sections(config: RunConfig) -> dict[str, Any]:
    """Return the given sections of a configuration as JSON values, without the plugins."""
    plain = to_plain(config).items()
    return {name: value for name, value in plain if name != "plugins" and value is not None}


def read_saved(path: Path) -> SavedRun:
    """Read and check the metadata of a step folder.

    Raises:
        CheckpointError: The manifest is damaged.
        ResumeError: The checkpoint is not of mt-train, or its metadata contradicts itself.
    """
    saved = _read(path, SavedRun)
    return replace(saved, config={**saved.config, "data": saved_data(saved.config["data"])})


def read_imported(path: Path) -> SavedModel | None:
    """Read the metadata of imported weights; None for the checkpoint of a run.

    Raises:
        CheckpointError: The manifest is damaged.
        ResumeError: The metadata contradicts itself.
    """
    is_run = "config" in inspect_checkpoint(path).metadata
    return None if is_run else _read(path, SavedModel)


def _read(path: Path, kind: type[Saved]) -> Saved:
    manifest = inspect_checkpoint(path)
    try:
        return manifest.metadata_as(kind)
    except CheckpointError as error:
        raise ResumeError(f"{path}: {error}") from error
