"""Agreement of all pipeline ranks on what failed on one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from mt_parallel_state import agreement_device, share_json
from mt_schedule import Action, Op, Schedule, simulate

from mt_pipeline.stage import StageError
from mt_pipeline.transfer import TransferError

_LONGEST = 4000
"""Longest reason that is sent, in characters; a compiler's error can have megabytes."""


def share_failure(
    error: StageError | None,
    *,
    schedule: Schedule | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> StageError | None:
    """Agree on the first failure of a run; every rank of the group calls it at the run's end.

    A rank that failed has gone on sending and receiving, so every rank gets here. It costs one
    all-reduce of one number, and nothing more if no rank failed.

    Args:
        error: The failure of this rank, or None.
        schedule: The schedule of the run; None before a run, where the lowest rank's failure
            counts as the first.
        group: The ranks of the pipeline.
        device: Device of the activations, which the group's backend therefore supports.

    Returns:
        The failure that comes first in the order in which data flows through the schedule. Later
        failures may be its consequences, because a failed stage sends zeros. On the rank that
        failed this is the error itself, with its cause. None if no rank failed.
    """
    note = None
    if error is not None:
        note = [*error.action, error.rank, error.reason[:_LONGEST]]
    failures = [_read(note) for note in share(note, group=group, device=device) if note]
    if not failures:
        return None
    timeline = () if schedule is None else simulate(schedule).timeline
    starts = {span.action: span.start for spans in timeline for span in spans}
    late = max(starts.values(), default=0.0) + 1
    first = min(
        failures,
        key=lambda f: (starts.get(f.action, late), f.rank),
    )
    return error if error is not None and error.rank == first.rank else first


def share_start(
    error: StageError | None,
    microbatches: int,
    *,
    stage: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> StageError | None:
    """Agree that a run can begin; every rank of the group calls it.

    A rank that does not know the shapes of activations could not even send zeros, so this has to
    come first. It costs one all-reduce of three numbers.

    Args:
        error: The failure of this rank before the run, or None.
        microbatches: Number of micro-batches that this rank was given.
        stage: A stage of this rank, to be named in the error if it has too few micro-batches.
        group: The ranks of the pipeline.
        device: Device of the activations.

    Returns:
        The error that every rank has to raise; None if the run can begin.

    Raises:
        TransferError: Another rank did not take part.
    """
    device = agreement_device(group, device)
    mine = torch.tensor([error is not None, microbatches, -microbatches], device=device)
    with _together(group):
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=group)
        failed, most, least = mine.tolist()
    if not failed and most == -least:
        return None
    if not failed and microbatches < most:
        error = StageError(
            Action(Op.F, stage, microbatches),
            dist.get_rank(group),
            f"ValueError: got {microbatches} micro-batches, but another rank got {most}: pass the "
            "same to all ranks",
        )
    return share_failure(error, schedule=None, group=group, device=device)


def _read(note: list[Any]) -> StageError:
    op, stage, microbatch, rank, reason = note
    return StageError(Action(Op(op), stage, microbatch), rank, reason)


def share(value: Any, *, group: dist.ProcessGroup | None, device: torch.device) -> list[Any]:
    """Return the values of all ranks, on every rank."""
    if group is None:
        return share_json(value, None)
    with _together(group):
        return share_json(value, group, device=device)


@contextmanager
def _together(group: dist.ProcessGroup) -> Iterator[None]:
    """Explain the error that a backend raises when a rank does not take part."""
    try:
        yield
    except RuntimeError as error:
        raise TransferError(
            f"pipeline rank {dist.get_rank(group)} did not meet the others before or after a run: "
            f"{error}. Look for the first error on another rank; every rank must call run, "
            "evaluate, infer and timeline as often as the others"
        ) from error
