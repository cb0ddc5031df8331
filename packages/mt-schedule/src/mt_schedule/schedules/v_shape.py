"""Schedules with split backwards and two stages on each rank, placed in a V: ZB-V, V-Half, V-Min.

Each takes the number of ranks, p, and any number of micro-batches, m. Rank r holds stages r and
2p - 1 - r. Data goes down the ranks and up again, so the first and the last stage are on rank 0.

Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362, build a schedule by
repeating a block, the actions of one micro-batch, every six units of time: two stages with F, I
and W. The delays of the block's four waves (F down, F up, I down, I up) from rank to rank decide
how long activations live, and so how many there are: if F down and I up together take D from one
rank to the next, and F up and I down too, there are about pD/3 activations of a stage.
"""

from __future__ import annotations

import itertools

from mt_schedule.action import Action, Op
from mt_schedule.ir import Schedule
from mt_schedule.schedules.filling import fill_weights
from mt_schedule.split import place_stages

_PERIOD = 6


def zb_v(stages: int, microbatches: int) -> Schedule:
    """ZB-V: zero bubble in the memory of 1F1B.

    Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 6; as V-ZB in
    arXiv 2405.15362, D = 6. If F, I and W take equal times and m is at least 2p, no rank waits
    between its first action and its last. Rank r begins r forwards after rank 0. Each rank holds
    at most 2p activations of a stage, as much memory as 1F1B's p activations of two stages.
    """
    orders = _orders(stages, microbatches, (4, 2, 4, 2))
    return _v_schedule("zb-v", orders, microbatches, limit=2 * stages, early=True)


def v_half(stages: int, microbatches: int) -> Schedule:
    """V-Half: half the bubble of 1F1B in about half its memory.

    Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362, D = 3.
    """
    orders = _orders(stages, microbatches, (2, 1, 2, 1))
    return _v_schedule("v-half", orders, microbatches, limit=2 * (stages // 2 + 1))


def v_min(stages: int, microbatches: int) -> Schedule:
    """V-Min: two thirds of the bubble of 1F1B in about a third of its memory.

    Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362, D = 2.
    """
    orders = _orders(stages, microbatches, (1, 1, 1, 1))
    return _v_schedule("v-min", orders, microbatches, limit=2 * ((stages + 4) // 3))


def _v_schedule(
    name: str, orders: list[list[Action]], microbatches: int, *, limit: int, early: bool = False
) -> Schedule:
    ranks = len(orders)
    placement = place_stages(ranks, 2, v_shape=True)
    limit = min(limit, 2 * microbatches)
    return Schedule(
        name=name,
        stages=2 * ranks,
        microbatches=microbatches,
        ranks=fill_weights(orders, placement, limit, early=early),
        stage_ranks=placement,
        peak_activations=(limit,) * ranks,
    )


def _orders(ranks: int, microbatches: int, waves: tuple[int, int, int, int]) -> list[list[Action]]:
    """Return the F and I of each rank, in the order of the repeated block."""
    orders = []
    for rank, starts in enumerate(_block(ranks, waves)):
        down, up = rank, 2 * ranks - 1 - rank
        events = [
            (start + _PERIOD * number, Action(op, stage, number))
            for start, op, stage in zip(
                starts, (Op.F, Op.F, Op.I, Op.I), (down, up, up, down), strict=True
            )
            for number in range(microbatches)
        ]
        orders.append([action for _, action in sorted(events)])
    return orders


def _block(ranks: int, waves: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    """Return the start times of F down, F up, I down and I up of the first micro-batch.

    There may be a pause between two waves, so that the block can repeat: no two actions of a rank
    may start at the same time of the period.
    """
    down, up, back_down, back_up = waves
    last = ranks - 1
    for pauses in sorted(itertools.product(range(1, 1 + _PERIOD), repeat=3), key=sum):
        turn = last * down + pauses[0]
        loss = turn + last * up + pauses[1]
        turn_back = loss + last * back_down + pauses[2]
        block = [
            (
                rank * down,
                turn + (last - rank) * up,
                loss + rank * back_down,
                turn_back + (last - rank) * back_up,
            )
            for rank in range(ranks)
        ]
        if all(len({start % _PERIOD for start in starts}) == len(starts) for starts in block):
            return block
    raise AssertionError(f"no block for {ranks} ranks with waves {waves}")  # a slip of ours
