"""Held-out loss and bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

import numpy as np
from mt_data import MicroBatch
from numpy.typing import NDArray

from mt_train.agreement import summed
from mt_train.config.kinds.section import HeldOutRows
from mt_train.data.loader import on_host, to_device
from mt_train.parts.objective import totals
from mt_train.reporting.metrics import Record
from mt_train.training.trainer import Trainer

# Micro-batches per stage between two looks at a stop request, and on the device at once.
_CHUNK = 8


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out rows, and how an evaluation reads them.

    Attributes:
        data: The rows.
        micro_batch_size: Rows per forward pass.
        max_windows: Use the first rows only; None for all.
    """

    data: HeldOutRows
    micro_batch_size: int
    max_windows: int | None


def evaluate(trainer: Trainer, held_out: HeldOut) -> Record | None:
    """Evaluate on all data-parallel ranks together.

    Bits per byte is the total negative log-likelihood in bits over the bytes of the text, so it
    does not depend on the tokenizer; with `max_windows` the bytes are counted in proportion. There
    is none where only some of the text is written, as of spans.

    Returns:
        `step`, `val_loss` (nats per token), `bits_per_byte` and for each further loss of the model
        `val_<name>_loss`, equal on all ranks; None when a rank was asked to stop before the end.
    """
    state, all_rows = trainer.state, held_out.data.rows
    count = min(len(all_rows), held_out.max_windows or len(all_rows))
    batches = all_rows.batches(
        min(held_out.micro_batch_size, -(-count // state.size("dp"))),  # no rows of nothing
        dp_rank=state.index("dp"),
        dp_size=state.size("dp"),
        limit=held_out.max_windows,
        rows=trainer.sampler.rows,
    )
    objective = trainer.objective
    names = [*objective.weights, *objective.counts]
    sums = [0.0] * len(names)
    trainer.train(training=False)
    try:
        while chunk := list(islice(batches, _CHUNK * state.size("pp"))):
            trainer.on_event("evaluate.chunk")
            if trainer.stop_requested():
                return None
            if len(objective.weights) > 1:
                chunk = [_without_filling(batch) for batch in chunk]
            on_device = to_device(on_host(chunk, state.device), state.device)
            outputs = trainer.executor.evaluate(on_device)
            inner = trainer.executor.inner_losses.items()
            both = [*enumerate(outputs), *((index, losses) for (index, _), losses in inner)]
            # Each rank has what its own stages return; tensor-parallel ranks have the same.
            if state.index("tp") == 0:
                real = [losses for index, losses in both if _rows(chunk[index]).any()]
                added = totals(real, names, state.device).tolist()
                sums = [a + b for a, b in zip(sums, added, strict=True)]
    finally:
        trainer.train(training=True)
    found = dict(zip(names, summed(state, *sums), strict=True))
    divisors = {name: max(found[name], 1) for name in objective.counts}
    losses = objective.record((found[name] for name in objective.weights), divisors, "val_")
    record = {"step": trainer.progress.step, **losses}
    of_text = held_out.data
    if of_text.num_bytes is not None:
        num_bytes = of_text.num_bytes * found["tokens"] / of_text.num_labels
        record["bits_per_byte"] = found["lm"] / math.log(2) / max(num_bytes, 1)
    return record


def _rows(batch: MicroBatch) -> NDArray[np.bool_]:
    """Tell which rows are windows; the others only fill batches up, without labels."""
    return batch["sample_ids"] >= 0


def _without_filling(batch: MicroBatch) -> MicroBatch:
    """Leave out the rows that fill a batch up: losses of layers are of all tokens.

    One of nothing else stays, as ranks may run layers together; its losses do not count.
    """
    rows = _rows(batch)
    if rows.all() or not rows.any():
        return batch
    return {name: array[rows] for name, array in batch.items()}
