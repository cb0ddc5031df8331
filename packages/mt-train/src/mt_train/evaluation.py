"""Held-out loss and bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

from mt_data import SequentialWindows

from mt_train.agreement import summed
from mt_train.loader import on_host, to_device
from mt_train.metrics import Record
from mt_train.trainer import Trainer

# Micro-batches per stage between two looks at a stop request, and on the device at once.
_CHUNK = 8


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out tokens as evaluation windows.

    Attributes:
        windows: Every token once as a label.
        num_bytes: UTF-8 bytes of the whole held-out text.
        micro_batch_size: Rows per forward pass.
        max_windows: Use the first windows only; None for all.
    """

    windows: SequentialWindows
    num_bytes: int
    micro_batch_size: int
    max_windows: int | None


def evaluate(trainer: Trainer, held_out: HeldOut) -> Record | None:
    """Evaluate on all data-parallel ranks together.

    Bits per byte is the total negative log-likelihood in bits over the bytes of the text, so it
    does not depend on the tokenizer; with `max_windows` the bytes are counted in proportion.

    Returns:
        `step`, `val_loss` (nats per token), `bits_per_byte`, equal on all ranks; None when a rank
        was asked to stop before the end.
    """
    state, windows = trainer.state, held_out.windows
    count = min(len(windows), held_out.max_windows or len(windows))
    batches = windows.batches(
        min(held_out.micro_batch_size, -(-count // state.size("dp"))),  # no rows of nothing
        dp_rank=state.index("dp"),
        dp_size=state.size("dp"),
        limit=held_out.max_windows,
        rows=trainer.rows,
    )
    counts = state.index("tp") == 0  # only the rank of the last stage has outputs
    nats = tokens = 0.0
    trainer.train(training=False)
    try:
        while chunk := list(islice(batches, _CHUNK * state.size("pp"))):
            trainer.on_event("evaluate.chunk")
            if trainer.stop_requested():
                return None
            on_device = to_device(on_host(chunk, state.device), state.device)
            outputs = trainer.executor.evaluate(on_device)
            for output in outputs if counts else ():
                nats += float(output["lm"])
                tokens += float(output["tokens"])
    finally:
        trainer.train(training=True)
    nats, tokens = summed(state, nats, tokens)
    num_bytes = held_out.num_bytes * tokens / windows.num_labels
    return {
        "step": trainer.progress.step,
        "val_loss": nats / max(tokens, 1),
        "bits_per_byte": nats / math.log(2) / max(num_bytes, 1),
    }
