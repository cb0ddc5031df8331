"""Schedules that overlap a forward with a backward: DualPipe and DualPipeV."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

from mt_schedule.action import Action, Op
from mt_schedule.ir import Schedule
from mt_schedule.split import place_stages


def dualpipe(stages: int, microbatches: int) -> Schedule:
    """DualPipe: micro-batches flow from both ends, and a forward hides a backward's transfers.

    DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.2.1. The model is
    there twice: rank r holds stage r of one direction and stage p - 1 - r of the other, each
    direction takes half of the micro-batches, and gradients of the two copies are added up at the
    end. The bubble is `(p/2 - 1)(t_F&B + t_B - 3 t_W)`, with t_F&B the time of an overlapped pair.
    A rank holds at most p + 1 activations.

    Args:
        stages: Number of ranks and of stages of the model, p; even.
        microbatches: Number of micro-batches, m; even, and at least 2p.

    Raises:
        ValueError: p or m does not fit.
    """
    if stages % 2:
        raise ValueError(
            f"stages is {stages}: dualpipe pairs the ranks of both ends, so it must be even; use "
            f"{stages + 1}, or dualpipe-v, which takes any number"
        )
    if microbatches % 2 or microbatches < 2 * stages:
        fitting = max(2 * stages, microbatches + microbatches % 2)
        raise ValueError(
            f"microbatches is {microbatches}: dualpipe on {stages} ranks takes an even number of "
            f"at least {2 * stages}; use {fitting}"
        )
    half = microbatches // 2
    lists = []
    for rank in range(stages):
        # The first chunk of each rank is the one whose data starts at this rank's end.
        ways = [(rank, 0), (2 * stages - 1 - rank, half)]
        chunks = ways if rank < stages // 2 else ways[::-1]
        lists.append(_eight_phases(stages // 2, min(rank, stages - 1 - rank), half, chunks))
    return _schedule("dualpipe", lists, microbatches, peak=stages + 1, directions=2)


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """DualPipeV: DualPipe cut in half, with two stages on each rank in a V and one model.

    Sea AI Lab, "DualPipe could be better without the Dual" (the cut), as in DeepSeek's DualPipe
    repository. With n ranks the bubble is `(n - 1)(t_F&B + t_B - 3 t_W)` with times of a stage,
    and a rank holds at most 2n + 1 activations of one.

    Args:
        stages: Number of ranks, n. Rank r holds stages r and 2n - 1 - r.
        microbatches: Number of micro-batches, m; at least 2n.

    Raises:
        ValueError: m is too small.
    """
    if microbatches < 2 * stages:
        raise ValueError(
            f"microbatches is {microbatches}: dualpipe-v on {stages} ranks takes at least "
            f"{2 * stages}; use that many, or zb-v, which takes any number"
        )
    lists = [
        _eight_phases(stages, rank, microbatches, [(rank, 0), (2 * stages - 1 - rank, 0)])
        for rank in range(stages)
    ]
    return _schedule("dualpipe-v", lists, microbatches, peak=2 * stages + 1)


def _schedule(
    name: str,
    lists: Sequence[Sequence[tuple[Action, ...]]],
    microbatches: int,
    *,
    peak: int,
    **options: Any,
) -> Schedule:
    ranks = len(lists)
    return Schedule(
        name=name,
        stages=2 * ranks,
        microbatches=microbatches,
        ranks=tuple(tuple(action for unit in units for action in unit) for units in lists),
        stage_ranks=place_stages(ranks, 2, v_shape=True),
        peak_activations=(peak,) * ranks,
        pairs=frozenset((u[0], u[1]) for units in lists for u in units if len(u) == 2),
        **options,
    )


def phase_lengths(ranks: int, rank: int, microbatches: int) -> tuple[int, ...]:
    """Return the number of repetitions of each of a rank's eight phases."""
    rest = ranks - rank - 1
    main = microbatches - 2 * ranks + rank + 1
    return (2 * rest, rank + 1, rest, main, rest, rank + 1, rest, rank + 1)


def _eight_phases(
    ranks: int, rank: int, microbatches: int, chunks: Sequence[tuple[int, int]]
) -> list[tuple[Action, ...]]:
    """Return the actions of a rank, single or as overlapped pairs.

    A chunk is given by its stage and its first micro-batch. Data passes chunk 0 before chunk 1, and
    turns around at the last rank.
    """
    n = phase_lengths(ranks, rank, microbatches)
    forwards, backwards = [
        [
            map(Action, itertools.repeat(op), itertools.repeat(stage), itertools.count(first))
            for stage, first in chunks
        ]
        for op in (Op.F, Op.B)
    ]
    weights: deque[Action] = deque()  # W of the split backwards, the oldest first

    def forward(chunk: int) -> Action:
        return next(forwards[chunk])

    def backward(chunk: int, *, split: bool = False) -> Action:
        action = next(backwards[chunk])
        if not split:
            return action
        weights.append(action._replace(op=Op.W))
        return action._replace(op=Op.I)

    weight = weights.popleft
    units: list[tuple[Action, ...]] = []
    units += [(forward(0),) for _ in range(n[0])]
    for _ in range(n[1]):
        units += [(forward(0),), (forward(1),)]
    for _ in range(n[2]):
        units += [(backward(1, split=True),), (weight(),), (forward(1),)]
    for turn in range(n[3]):
        pair = (forward(0), backward(1))
        # The last rank's first pair would wait for both inputs while earlier ranks wait for its F.
        units += [(pair[0],), (pair[1],)] if turn == 0 and rank == ranks - 1 else [pair]
        units += [(forward(1), backward(0))]
    for _ in range(n[4]):
        units += [(backward(1),), (forward(1), backward(0))]
    for turn in range(2 * n[5]):
        units += [(backward(1 - turn % 2, split=turn >= n[5]),)]
    for _ in range(n[6]):
        units += [(weight(),), (backward(0, split=True),)]
    units += [(weight(),) for _ in range(n[7])]
    return units
