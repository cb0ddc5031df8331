"""Activation memory of a rank: expected by the plan, and measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from mt_model import KeptBytes, ModelConfig, RecomputePlan, expected_bytes
from mt_optim import DistributedOptimizer
from mt_parallel_state import ParallelLayout, ParallelState

from mt_train.config.run_config import RunConfig
from mt_train.parts.part import Setup, TrainerPart
from mt_train.reporting.metrics import Record

if TYPE_CHECKING:
    from mt_tokenizer import Tokenizer

    from mt_train.config.loading import LoadedConfig


class ActivationWatch(TrainerPart):
    """A comparison of the first step's activation memory with the expectation of the plan.

    It is for runs with a plan of `training.recompute`. The expectation is measured on one row.
    There is none if parameters are sharded over ranks (data_parallel.strategy `full`), for a model
    with an encoder, for compiled layers or for quantised ones.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._kept = list[Mapping[int, KeptBytes]]()
        self._expected: KeptBytes | None = None
        self._is_measured = False

    @staticmethod
    def is_wanted(config: RunConfig) -> bool:
        """Return whether the run has a plan."""
        return not RecomputePlan.of(config.training.recompute).is_empty

    @staticmethod
    def check(loaded: LoadedConfig, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
        """Check that the model has the modules that the plan names."""
        del tokenizer
        plan = loaded.config.training.recompute
        if isinstance(plan, str):
            return
        alone = ParallelState(ParallelLayout())
        try:
            model.build(alone, device="meta", seed=None, recompute=plan)
        except ValueError as error:
            raise loaded.error("training.recompute", str(error)) from error

    def optimizer_ready(self, optimizer: DistributedOptimizer) -> None:
        """Measure the expectation on one row, if one row shows it."""
        del optimizer
        config, state = self.setup.config, self.setup.state
        measures = config.data_parallel.strategy != "full" and not config.data.feeds_encoder
        measures = measures and not config.training.compile  # the compiler says what it keeps
        measures = measures and config.precision.recipe is None  # whose state sees every forward
        if measures:
            batch = batch_of(config, state)
            batch = {name: x.to(state.device) for name, x in batch.items()}
            found = (expected_bytes(stage, batch).values() for stage in self.setup.stages)
            self._expected = _total(kept for each in found for kept in each)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Measure the first step."""
        if self._is_measured:
            yield
            return
        with ExitStack() as stack:
            stages = self.setup.stages
            self._kept = [stack.enter_context(s.watch_activations()) for s in stages]
            yield
        self._is_measured = True

    def record(self, sums: Sequence[float], so_far: Record) -> Record:
        """Return the measurement of the first step."""
        del sums, so_far
        kept, self._kept = self._kept, []
        if not kept:
            return {}
        total = _total(layer for each in kept for layer in each.values())
        found = {"activation_bytes": total.device, "offloaded_bytes": total.host}
        if self._expected is not None:
            found["expected_activation_bytes"] = self._expected.device
            found["expected_offloaded_bytes"] = self._expected.host
        return found

    def notes(self, record: Record) -> Iterator[str]:
        """Yield the measurement, on the first rank."""
        if "activation_bytes" in record and self.setup.state.rank == 0:
            text = f"the layers keep {_both(record, '')} for each micro-batch"
            if "expected_activation_bytes" in record:
                text += f"; the plan: {_both(record, 'expected_')}"
            yield text


def batch_of(
    config: RunConfig, state: ParallelState, *, items: Mapping[str, int] | None = None
) -> dict[str, torch.Tensor]:
    """Return a micro-batch of zeros as a rank gets them, on the CPU.

    Args:
        config: The run.
        state: This rank's place.
        items: Number of items in the rows by name, such as images; by default none.
    """
    rows = config.training.micro_batch_size
    sizes = {**config.data.sizes(config.training.sequence_length), **(items or {})}
    batch = {"sample_ids": torch.arange(rows)}
    for field in config.data.fields():
        shape = [sizes[dim] for dim in field.dims]
        if field.cut == "along":
            shape[0] //= state.size("cp")
        value = 1 if field.dtype == "bool" else 0  # a mask hides nothing
        whole = shape if field.joined else [rows, *shape]
        batch[field.name] = torch.full(whole, value, dtype=getattr(torch, field.dtype))
    return batch


def _both(record: Record, prefix: str) -> str:
    here, away = record[f"{prefix}activation_bytes"], record[f"{prefix}offloaded_bytes"]
    text = f"{here / 2**20:.2f} MiB of activations"
    return f"{text} and {away / 2**20:.2f} MiB in the host's memory" if away else text


def _total(kept: Iterable[KeptBytes]) -> KeptBytes:
    both = list(kept)
    return KeptBytes(sum(each.device for each in both), sum(each.host for each in both))
