"""The protocol of a trainer's parts: the moment of each hook, and the changes that it may make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from mt_data_parallel import GradBuffer
from mt_model import GPT, ModelConfig
from mt_optim import DistributedOptimizer
from mt_parallel_state import ParallelLayout, ParallelState
from torch import Tensor

from mt_train.parts.objective import Objective
from mt_train.parts.update import Update
from mt_train.reporting.metrics import Record

if TYPE_CHECKING:
    from mt_tokenizer import Tokenizer

    from mt_train.config.loading import LoadedConfig
    from mt_train.config.run_config import RunConfig

Run = Callable[..., Any]
"""Callable of one stage."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Inputs of every part of one rank's trainer.

    Attributes:
        config: The run.
        model: The whole model's configuration.
        state: This rank's place in the layout.
        stages: Model stages of this rank; their parameters are on the meta device at first.
        stage_options: Arguments of `ModelConfig.build` that all stages have.
        microbatches: Micro-batches of one step on this rank.
        folder: Folder for files beside checkpoints.
    """

    config: RunConfig
    model: ModelConfig
    state: ParallelState
    stages: Sequence[GPT]
    stage_options: Mapping[str, Any]
    microbatches: int
    folder: Path


class TrainerPart:
    """One feature of training, such as low precision.

    A part overrides the hooks it needs and joins the list in `mt_train.parts.registry`. The
    trainer calls the hooks in the order they have here, for all parts in the order of the list,
    and names no part. Every rank makes the same parts, so that a hook may communicate.

    Args:
        setup: Inputs of the part; parameters have no memory yet.

    Attributes:
        folder: Folder of a checkpoint with the tensors of `state_tensors`.
        uncounted: Key and reason why `mt-train memory` can't count a run with this part.
    """

    folder: ClassVar[str] = ""
    uncounted: ClassVar[tuple[str, str] | None] = None

    @staticmethod
    def is_wanted(config: RunConfig) -> bool:
        """Return whether a run has this part."""
        del config
        return True

    @staticmethod
    def check(loaded: LoadedConfig, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
        """Check the configuration of a run that wants this part, before anything is built.

        Args:
            loaded: The run.
            model: The model.
            tokenizer: Tokenizer of the run's data; None for tokens alone.

        Raises:
            ConfigError: The part can't work with this model or these settings.
        """

    @staticmethod
    def check_layout(loaded: LoadedConfig, model: ModelConfig, layout: ParallelLayout) -> None:
        """Check the layout of a run that wants this part.

        Raises:
            ConfigError: The part can't work on this layout.
        """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    # While the trainer is built.

    @property
    def extra_hidden_size(self) -> int:
        """Numbers that each token carries between stages besides the hidden state."""
        return 0

    def objective(self, objective: Objective) -> Objective:
        """Return the objective to train on in place of `objective`."""
        return objective

    def shard_options(self) -> Mapping[str, Any]:
        """Return further arguments of `mt_data_parallel.shard`."""
        return {}

    def parameters_ready(self, buffer: GradBuffer) -> None:
        """Set up features of parameters, which now have their memory."""

    def wrap(self, runs: list[Run]) -> list[Run]:
        """Return one callable for each stage, which the pipeline calls in place of `runs`."""
        return runs

    def optimizer_ready(self, optimizer: DistributedOptimizer) -> None:
        """Set up features of the optimizer or of complete stages."""

    def wrap_update(self, update: Update) -> Update:
        """Return the object that takes the optimizer's step in place of `update`."""
        return update

    def lines(self) -> Iterator[str]:
        """Yield the lines that the run prints once at its start; all ranks call it together."""
        return iter(())

    # In each step.

    def begin_step(self, step: int) -> None:
        """Prepare for the step after `step` completed ones."""

    def passes(self) -> AbstractContextManager[object]:
        """Return the context that forward and backward of all micro-batches run in."""
        return nullcontext()

    def own_numbers(self) -> Tensor:
        """Return this rank's numbers, on the device; the trainer sums them over all ranks.

        Shape:
            fp64 [n]; n is the same in each step and on all ranks.
        """
        return torch.zeros(0, dtype=torch.float64, device=self.setup.state.device)

    def end_passes(self) -> None:
        """React to the end of the step's passes, before the optimizer changes weights eagerly."""

    def record(self, sums: Sequence[float], so_far: Record) -> Record:
        """Return further metrics of the step.

        Args:
            sums: `own_numbers` summed over all ranks.
            so_far: The step's number, losses, rates and speed.
        """
        del sums, so_far
        return {}

    def notes(self, record: Record) -> Iterator[str]:
        """Yield the lines that this rank prints after a step with these metrics."""
        del record
        return iter(())

    def close(self) -> None:
        """Release everything held; also called after an error."""

    # Around checkpoints.

    def state_tensors(self) -> Mapping[str, Tensor]:
        """Return the sharded tensors that a checkpoint keeps for this part, by global name."""
        return {}

    def weights_loaded(self) -> None:
        """React to newly loaded weights and state tensors."""
