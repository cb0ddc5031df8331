"""Tells every rank of a pipeline what failed on one of them."""

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
"""Characters of a reason that travel; a compiler's error can have megabytes."""


def share_failure(
    error: StageError | None,
    *,
    schedule: Schedule | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> StageError | None:
    """Agree on the first failure of a run; every rank of the group calls it at the run's end.

    A rank that failed has gone on sending and receiving, so all get here. It costs one all-reduce
    of one number, and nothing else where all went well.

    Args:
        error: What failed on this rank, None where nothing did.
        schedule: What was run; None before a run, then the lowest rank's failure is the first.
        group: The ranks of the pipeline.
        device: Where activations live, which the group's backend therefore takes.

    Returns:
        The failure that comes first by the data's way through the schedule: the others may be its
        consequences, as what a failed stage hands on is zeros. On its own rank it is the error
        itself, with its cause. None where no rank failed.
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
        key=lambda f: (0 if f.op is Op.GATHER else starts.get(f.action, late), f.rank),
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

    A rank that cannot say how large activations are could not even send zeros. It costs one
    all-reduce of three numbers.

    Args:
        error: What failed on this rank before the run, None where nothing did.
        microbatches: How many this rank was given.
        stage: A stage of this rank, to be named where it has too few.
        group: The ranks of the pipeline.
        device: Where activations live.

    Returns:
        What every rank has to raise; None where the run can begin.

    Raises:
        TransferError: Another rank did not come.
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
    """Give every rank the values of all; a failure to meet says what it means."""
    if group is None:
        return share_json(value, None)
    with _together(group):
        return share_json(value, group, device=device)


@contextmanager
def _together(group: dist.ProcessGroup) -> Iterator[None]:
    """Say what it means where ranks do not meet."""
    try:
        yield
    except RuntimeError as error:
        raise TransferError(
            f"pipeline rank {dist.get_rank(group)} did not meet the others before or after a run: "
            f"{error}. Look for the first error on another rank; every rank must call run, "
            "evaluate, infer and timeline as often as the others"
        ) from error
