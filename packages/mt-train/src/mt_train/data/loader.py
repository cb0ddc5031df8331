"""Loading of micro-batches from the data onto a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from mt_context_parallel import segments
from mt_data import BatchSampler, MicroBatch, Prefetcher, Rows
from mt_files import RowField, Stage
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


def rows_of(state: ParallelState, length: int, whole: Rows, stages: tuple[Stage, ...]) -> Rows:
    """Return the rows that this rank reads; in a context-parallel group, its part of each row.

    Tensor-parallel ranks all need the same tokens, and each reads them. With the page cache, this
    costs less than a read on one rank and a broadcast, and no collective runs on a thread.

    Args:
        state: This rank's place.
        length: Tokens of a row.
        whole: Rows of a rank with whole rows.
        stages: Stages of a pipeline that this rank has.
    """
    parts = None
    if state.size("cp") > 1:
        own = segments(length, ranks=state.size("cp"), rank=state.index("cp"))
        parts = tuple((run.start, run.start + run.length) for run in own)
    return replace(whole, parts=parts, stages=stages)


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
        fields = sampler.fields
        labels = [labels_of(batch, fields, sampler.rows, counts) for batch in batches]
        return HostStep(batches=on_host(batches, device), labels=labels)

    return Prefetcher(sampler, prepare)


def labels_of(
    batch: MicroBatch, fields: Sequence[RowField], rows: Rows, counts: Sequence[str]
) -> list[int]:
    """Count the labels of a micro-batch, by the counts that its fields name.

    A token is a label of multi-token prediction (MTP) at distance n (`tokens_n`) if n tokens
    precede it in its document, or in its row without document packing.

    Args:
        batch: The micro-batch.
        fields: Its fields.
        rows: The parts of its rows that this rank has.
        counts: Names of the counts.

    Returns:
        Number of labels of each count; 0 if no field counts it.
    """
    known = {field.counts for field in fields}
    found = []
    for name in counts:
        count, _, distance = (name, "", "") if name in known else name.rpartition("_")
        labels = (field for field in fields if field.counts == count)
        found.append(sum(_count(batch, field, rows, int(distance or 0)) for field in labels))
    return found


def _count(batch: MicroBatch, field: RowField, rows: Rows, distance: int) -> int:
    counted = batch[field.name] != field.fill
    if distance:  # rows that a data set makes may have another length than the parts are of
        own = field.positions
        place = rows.columns(counted.shape[1]) if own is None else batch[own]
        counted &= place >= distance
    return int(np.count_nonzero(counted))


def on_host(batches: Sequence[MicroBatch], device: torch.device) -> list[Batch]:
    """Make tensors of micro-batches of numpy arrays, pinned if the device is an accelerator."""
    pins = device.type == "cuda"
    # A thread of its own begins with the first device, and pinning would make a context on it.
    with torch.cuda.device(device) if pins else nullcontext():
        return [
            {name: _tensor(array, pinned=pins) for name, array in batch.items()}
            for batch in batches
        ]


def to_device(batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    """Copy micro-batches from the host to this rank's device, without a wait of the host."""
    return [
        {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        for batch in batches
    ]


def _tensor(array: Any, *, pinned: bool) -> torch.Tensor:
    tensor = torch.from_numpy(cast("Any", array))
    return tensor.pin_memory() if pinned else tensor
