"""Schedules with split backwards and one stage on each rank: ZB-H1 and ZB-H2.

Each takes the number of stages, p, and any number of micro-batches, m.
"""

from __future__ import annotations

from collections.abc import Sequence

from mt_schedule.action import Action, Op
from mt_schedule.ir import Schedule
from mt_schedule.schedules.filling import fill_weights
from mt_schedule.schedules.one_pass import alternating


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with split backwards, in no more memory than 1F1B's first rank.

    Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.2. Every rank may
    hold p activations, so rank r defers W by r micro-batches, and the bubble is
    `(p - 1)(t_F + t_I - t_W)`: a third of 1F1B's bubble if the three times are equal.
    """
    return _split_1f1b("zb-h1", stages, microbatches, [stages - r - 1 for r in range(stages)])


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """ZB-H2: a longer warm-up, so that no rank waits between its first and its last action.

    Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.3. Every rank may
    hold 2p - 1 activations. If F, I and W take equal times and m is at least 2p - 1, each rank
    works without a gap. It starts one forward after the previous rank, and ends one forward later,
    so there is no bubble if the next step begins without waiting for all ranks.
    """
    return _split_1f1b("zb-h2", stages, microbatches, [2 * (stages - r - 1) for r in range(stages)])


def _split_1f1b(name: str, stages: int, microbatches: int, warmups: Sequence[int]) -> Schedule:
    numbers = range(microbatches)
    orders = [
        alternating(
            [Action(Op.F, rank, number) for number in numbers],
            [Action(Op.I, rank, number) for number in numbers],
            warmup=min(warmup, microbatches),
        )
        for rank, warmup in enumerate(warmups)
    ]
    limit = min(max(warmups) + 1, microbatches)
    return Schedule(
        name=name,
        stages=stages,
        microbatches=microbatches,
        ranks=fill_weights(orders, range(stages), limit),
        peak_activations=(limit,) * stages,
    )
