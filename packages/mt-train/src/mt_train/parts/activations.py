"""What the layers of a rank keep for backward: by the plan, and measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from mt_model import GPT, KeptBytes, RecomputePlan, expected_bytes
from mt_parallel_state import ParallelState

from mt_train.config.run_config import RunConfig
from mt_train.reporting.metrics import Record


class ActivationWatch:
    """Compares, once, what a rank's stages keep of a micro-batch with what their plan lets expect.

    It does so for runs with a plan of `training.recompute`. What is expected is measured on one
    row; parameters that are shared out over ranks are not there for that, and so with
    data_parallel.strategy `full` nothing is expected; nor is it of a model with an encoder, of
    compiled layers, or of quantised ones. Every rank makes one.

    Args:
        config: The run.
        stages: Of this rank.
        state: This rank's place.
    """

    def __init__(self, config: RunConfig, stages: Sequence[GPT], state: ParallelState) -> None:
        self._stages, self._kept = stages, list[Mapping[int, KeptBytes]]()
        self._wanted = not RecomputePlan.of(config.training.recompute).is_empty
        self._expected: KeptBytes | None = None
        measures = config.data_parallel.strategy != "full" and config.data.spans is None
        measures = measures and not config.training.compile  # the compiler says what it keeps
        measures = measures and config.precision.recipe is None  # whose state sees every forward
        if self._wanted and measures:
            batch = batch_of(config, state)
            batch = {name: x.to(state.device) for name, x in batch.items()}
            found = (expected_bytes(stage, batch).values() for stage in stages)
            self._expected = _total(kept for each in found for kept in each)

    @contextmanager
    def first_step(self) -> Iterator[None]:
        """Measure the step inside, if none was yet."""
        if not self._wanted:
            yield
            return
        with ExitStack() as stack:
            self._kept = [stack.enter_context(s.watch_activations()) for s in self._stages]
            yield
        self._wanted = False

    def record(self) -> Record:
        """Return what was measured, once; nothing without a plan."""
        kept, self._kept = self._kept, []
        if not kept:
            return {}
        total = _total(layer for each in kept for layer in each.values())
        found = {"activation_bytes": total.device, "offloaded_bytes": total.host}
        if self._expected is not None:
            found["expected_activation_bytes"] = self._expected.device
            found["expected_offloaded_bytes"] = self._expected.host
        return found


def batch_of(config: RunConfig, state: ParallelState) -> dict[str, torch.Tensor]:
    """Return a micro-batch of zeros as a rank gets them, on the CPU."""
    rows, length = config.training.micro_batch_size, config.training.sequence_length
    tokens = torch.zeros(rows, length // state.size("cp"), dtype=torch.long)
    batch = {"tokens": tokens, "labels": tokens, "sample_ids": torch.arange(rows)}
    if config.data.hidden is not None:
        batch["mask"] = torch.ones(rows, length, dtype=torch.bool)
    if config.data.packing == "documents":
        batch["documents"] = torch.zeros(rows, length, dtype=torch.long)
    return batch


def describe(record: Record) -> str | None:
    """Say what a record of a step has of activations; None where it has nothing."""
    if "activation_bytes" not in record:
        return None
    text = f"the layers keep {_both(record, '')} for each micro-batch"
    if "expected_activation_bytes" in record:
        text += f"; the plan: {_both(record, 'expected_')}"
    return text


def _both(record: Record, prefix: str) -> str:
    here, away = record[f"{prefix}activation_bytes"], record[f"{prefix}offloaded_bytes"]
    text = f"{here / 2**20:.2f} MiB of activations"
    return f"{text} and {away / 2**20:.2f} MiB in the host's memory" if away else text


def _total(kept: Iterable[KeptBytes]) -> KeptBytes:
    both = list(kept)
    return KeptBytes(sum(each.device for each in both), sum(each.host for each in both))
