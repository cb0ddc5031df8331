"""Schedules with one stage on each rank and whole backwards: GPipe and 1F1B.

Each takes the number of stages, p, and any number of micro-batches, m, even fewer than p.
"""

from __future__ import annotations

from mt_schedule.action import Action, Op
from mt_schedule.ir import Schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    arXiv 1811.06965, figure 2. It takes as long as 1F1B, `(m + p - 1)(t_F + t_B)`, but holds all m
    activations. Backwards run in the order of the micro-batches, not in reverse as in the figure,
    so that gradients add up in the same order as without a pipeline.
    """
    numbers = range(microbatches)
    return Schedule(
        name="gpipe",
        stages=stages,
        microbatches=microbatches,
        ranks=tuple(
            tuple(Action(op, rank, number) for op in (Op.F, Op.B) for number in numbers)
            for rank in range(stages)
        ),
        peak_activations=(microbatches,) * stages,
    )


def one_forward_one_backward(stages: int, microbatches: int, *, overlap: bool = False) -> Schedule:
    """1F1B: after a warm-up, each rank alternates one forward and one backward.

    PipeDream-Flush of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
    arXiv 2006.09503, figure 4 of "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", arXiv 2104.04473. With p stages and m micro-batches, rank r starts with
    `min(p - r - 1, m)` forwards, holds at most `min(p - r, m)` activations, and the whole takes
    `(m + p - 1)(t_F + t_B)`. One stage is plain gradient accumulation: F0 B0 F1 B1 ...

    With `overlap`, each forward is paired with the backward after it, as in Megatron-LM's combined
    1F1B, to hide the all-to-alls of experts. A pair sends both results only at its end, so the
    gradient of an activation comes back after two pairs for each later rank. The warm-up is
    therefore `min(2(p - r - 1) + 1, m)`; with a shorter one every pair would wait for another.
    Rank r then holds at most `min(2(p - r), m)` activations, and each of the last rank's m - 1
    pairs adds t_F&B to the makespan instead of t_F + t_B. On one rank it is F0 F1&B0 F2&B1 ...

    Args:
        stages: Number of stages.
        microbatches: Number of micro-batches.
        overlap: Whether forwards and backwards are overlapped pairs.
    """
    numbers = range(microbatches)
    ranks, peaks, pairs = [], [], []
    for rank in range(stages):
        ahead = stages - rank - 1
        warmup = min(2 * ahead + 1 if overlap else ahead, microbatches)
        forwards = [Action(Op.F, rank, number) for number in numbers]
        backwards = [Action(Op.B, rank, number) for number in numbers]
        ranks.append(alternating(forwards, backwards, warmup=warmup))
        peaks.append(min(warmup + 1, microbatches))
        pairs += steady(forwards, backwards, warmup=warmup)
    return Schedule(
        name="1f1b",
        stages=stages,
        microbatches=microbatches,
        ranks=tuple(ranks),
        peak_activations=tuple(peaks),
        pairs=frozenset(pairs) if overlap else frozenset(),
    )


def alternating(
    forwards: list[Action], backwards: list[Action], *, warmup: int
) -> tuple[Action, ...]:
    """Return `warmup` forwards, then forwards and backwards in turn, then the other backwards."""
    return (
        *forwards[:warmup],
        *(action for pair in steady(forwards, backwards, warmup=warmup) for action in pair),
        *backwards[len(forwards) - warmup :],
    )


def steady(
    forwards: list[Action], backwards: list[Action], *, warmup: int
) -> list[tuple[Action, Action]]:
    """Return the forwards after the warm-up, each with the backward after it."""
    return list(zip(forwards[warmup:], backwards, strict=False))
