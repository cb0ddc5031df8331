"""Schedules with one stage on each rank and whole backwards: GPipe and 1F1B."""

from __future__ import annotations

from mt_pipeline.action import Action, Op
from mt_pipeline.ir import Schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    arXiv 1811.06965, figure 2. It takes as long as 1F1B, `(m + p - 1)(t_F + t_B)`, but holds all m
    activations. The backwards go in the order of the micro-batches, not backwards as in the figure,
    so that gradients add up in the same order as without a pipeline.

    Args:
        stages: Number of stages, p; one per rank.
        microbatches: Number of micro-batches, m; any number.

    Returns:
        The schedule, with its peak declared.
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


def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """1F1B: after a warm-up, each rank alternates one forward and one backward.

    PipeDream-Flush of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
    arXiv 2006.09503, figure 4 of "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", arXiv 2104.04473. With p stages and m micro-batches, rank r starts with
    `min(p - r - 1, m)` forwards, holds at most `min(p - r, m)` activations, and the whole takes
    `(m + p - 1)(t_F + t_B)`. One stage is plain gradient accumulation: F0 B0 F1 B1 ...

    Args:
        stages: Number of stages, p; one per rank.
        microbatches: Number of micro-batches, m; any number, also fewer than stages.

    Returns:
        The schedule, with its peak declared.
    """
    numbers = range(microbatches)
    return Schedule(
        name="1f1b",
        stages=stages,
        microbatches=microbatches,
        ranks=tuple(
            alternating(
                [Action(Op.F, rank, number) for number in numbers],
                [Action(Op.B, rank, number) for number in numbers],
                warmup=min(stages - rank - 1, microbatches),
            )
            for rank in range(stages)
        ),
        peak_activations=tuple(min(stages - rank, microbatches) for rank in range(stages)),
    )


def alternating(
    forwards: list[Action], backwards: list[Action], *, warmup: int
) -> tuple[Action, ...]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards left."""
    steady = zip(forwards[warmup:], backwards, strict=False)
    return (
        *forwards[:warmup],
        *(action for pair in steady for action in pair),
        *backwards[len(forwards) - warmup :],
    )
