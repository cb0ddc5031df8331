"""Held-out loss and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice

import numpy as np
from mt_data import InOrder, MicroBatch
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
    """Held-out rows, with the options of their evaluation.

    Attributes:
        data: The rows.
        micro_batch_size: Number of rows per forward pass.
        max_windows: Number of first rows to use; None for all.
    """

    data: HeldOutRows
    micro_batch_size: int
    max_windows: int | None


def evaluate(trainer: Trainer, sets: Mapping[str, HeldOut]) -> Record | None:
    """Evaluate on all data-parallel ranks together.

    Bits per byte is the total negative log-likelihood in bits over the bytes of the text, so it
    does not depend on the tokenizer; with `max_windows` the bytes are counted in proportion. There
    is no such value if only a part of the text is predicted, as with spans.

    Args:
        trainer: Its model is evaluated.
        sets: Held-out sets by name; a single one needs no name.

    Returns:
        `step`, `val_loss` (nats per token), `bits_per_byte` and for each further loss of the model
        `val_<name>_loss`, of all sets together; the same numbers of each named set as
        `val_loss/<set>` and so on; and `val_<name>_loss` of each variant of the rows. They are
        equal on all ranks. None if a rank was asked to stop before the end.
    """
    record, parts, variants = {}, [], {}
    for name, held_out in sets.items():
        found = _sums(trainer, held_out, held_out.data.rows)
        if found is None:
            return None
        parts.append((found, _num_bytes(found, held_out.data)))
        own = _means(trainer, *parts[-1])
        for variant, rows in held_out.data.variants.items():
            found = _sums(trainer, held_out, rows)
            if found is None:
                return None
            variants.setdefault(variant, []).append(found)
            own |= _variant_loss(variant, [found])
        if name:
            record |= {f"{key}/{name}": value for key, value in own.items()}
    counts = [count for _, count in parts]
    num_bytes = None if None in counts else sum(filter(None, counts))
    total = _means(trainer, _added([found for found, _ in parts]), num_bytes)
    for variant, each in variants.items():
        total |= _variant_loss(variant, each)
    return {"step": trainer.progress.step, **total, **record}


def _added(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(found[name] for found in sums) for name in sums[0]}


def _variant_loss(variant: str, sums: Sequence[Mapping[str, float]]) -> Record:
    """Return the mean loss of the language model; empty without labels."""
    found = _added(sums)
    return {f"val_{variant}_loss": found["lm"] / found["tokens"]} if found["tokens"] else {}


def _names(trainer: Trainer) -> list[str]:
    """Name the sums of an evaluation: losses, then counts."""
    return [*trainer.objective.weights, *trainer.objective.counts]


def _num_bytes(found: Mapping[str, float], text: HeldOutRows) -> float | None:
    """Return the number of bytes of the evaluated tokens' text, if known."""
    return None if text.num_bytes is None else text.num_bytes * found["tokens"] / text.num_labels


def _means(trainer: Trainer, found: Mapping[str, float], num_bytes: float | None) -> Record:
    """Divide sums by their counts."""
    objective = trainer.objective
    divisors = {name: max(found[name], 1) for name in objective.counts}
    record = objective.record((found[name] for name in objective.weights), divisors, "val_")
    if num_bytes is not None:
        record["bits_per_byte"] = found["lm"] / math.log(2) / max(num_bytes, 1)
    return record


def _sums(trainer: Trainer, held_out: HeldOut, all_rows: InOrder) -> dict[str, float] | None:
    """Return the losses and counts of some rows on all ranks; None if a rank was asked to stop."""
    state = trainer.state
    count = min(len(all_rows), held_out.max_windows or len(all_rows))
    batches = all_rows.batches(
        min(held_out.micro_batch_size, -(-count // state.size("dp"))),  # no rows of nothing
        dp_rank=state.index("dp"),
        dp_size=state.size("dp"),
        limit=held_out.max_windows,
        rows=trainer.sampler.rows,
    )
    names = _names(trainer)
    joined = {field.name for field in trainer.sampler.fields if field.joined}
    sums = [0.0] * len(names)
    trainer.train(training=False)
    try:
        while chunk := list(islice(batches, _CHUNK * state.size("pp"))):
            trainer.on_event("evaluate.chunk")
            if trainer.stop_requested():
                return None
            if len(trainer.objective.weights) > 1:
                chunk = [_without_filling(batch, joined) for batch in chunk]
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
    return dict(zip(names, summed(state, *sums), strict=True))


def _rows(batch: MicroBatch) -> NDArray[np.bool_]:
    """Return whether each row is a window; the others only fill batches, without labels."""
    return batch["sample_ids"] >= 0


def _without_filling(batch: MicroBatch, joined: Set[str]) -> MicroBatch:
    """Leave out the rows that only fill a batch, since losses of layers cover all tokens.

    A batch of only such rows stays, since ranks may run layers together; its losses do not count.
    Such rows have no items of arrays in `joined`, such as images.
    """
    rows = _rows(batch)
    if rows.all() or not rows.any():
        return batch
    return {name: x if name in joined else x[rows] for name, x in batch.items()}
