"""Micro-batches on their way from the data to a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from mt_context_parallel import segments
from mt_data import PADDING, BatchSampler, MicroBatch, Prefetcher, Rows, count_labels
from mt_parallel_state import ParallelState

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class HostStep:
    """Data of one step, ready on the host.

    Attributes:
        batches: Micro-batches of this rank, as tensors on the host.
        labels: Counts of each micro-batch, in the order of `Objective.counts`.
    """

    batches: list[Batch]
    labels: list[list[int]]


def rows_of(
    state: ParallelState, length: int, *, packing: Literal["none", "documents"], reads: bool
) -> Rows:
    """Return the rows that this rank reads; in a context-parallel group, its part of each row.

    Tensor-parallel ranks all need the same tokens, and each reads them. From the page cache that
    costs less than one rank's reading and a broadcast, and no collective runs on a thread.

    Args:
        state: This rank's place.
        length: Tokens of a row.
        packing: Whether attention is kept within documents.
        reads: Whether this rank has the first or the last stage of a pipeline.
    """
    parts = None
    if state.size("cp") > 1:
        own = segments(length, ranks=state.size("cp"), rank=state.index("cp"))
        parts = tuple((run.start, run.start + run.length) for run in own)
    return Rows(packing=packing, parts=parts, reads=reads)


def prefetched(
    sampler: BatchSampler, device: torch.device, *, counts: Sequence[str] = ("tokens",)
) -> Prefetcher[HostStep]:
    """Read steps on a thread while the ones before them are computed.

    Args:
        sampler: Source of each step's micro-batches.
        device: Device of this rank.
        counts: Names of the counts, from `Objective.counts`.
    """

    def prepare(batches: list[MicroBatch]) -> HostStep:
        labels = [labels_of(batch, sampler.rows, counts) for batch in batches]
        return HostStep(batches=on_host(batches, device), labels=labels)

    return Prefetcher(sampler, prepare)


def labels_of(batch: MicroBatch, rows: Rows, counts: Sequence[str]) -> list[int]:
    """Count the labels of tokens, of multi-token prediction (MTP), and of sequences.

    A token is an MTP label at distance n (`tokens_n`) if n tokens precede it in its document, or
    in its row without document packing.
    """
    labels = batch["labels"]
    found = []
    for name in counts:
        if name == "sequences":
            found.append(count_labels([batch], "sequence_labels"))
        else:
            behind, counted = int(name.partition("_")[2] or 0), labels != PADDING
            if behind:  # rows that a data set makes may have another length than the parts are of
                place = batch.get("positions", rows.columns(labels.shape[1]))
                counted &= place >= behind
            found.append(int(np.count_nonzero(counted)))
    return found


def on_host(batches: Sequence[MicroBatch], device: torch.device) -> list[Batch]:
    """Make tensors of micro-batches of numpy arrays, pinned where the device is an accelerator."""
    pins = device.type == "cuda"
    # A thread of its own begins with the first device, and pinning would make a context on it.
    with torch.cuda.device(device) if pins else nullcontext():
        return [
            {name: _tensor(array, pinned=pins) for name, array in batch.items()}
            for batch in batches
        ]


def to_device(batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    """Copy micro-batches from the host to this rank's device, which the host does not wait for."""
    return [
        {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        for batch in batches
    ]


def _tensor(array: Any, *, pinned: bool) -> torch.Tensor:
    tensor = torch.from_numpy(cast("Any", array))
    return tensor.pin_memory() if pinned else tensor
