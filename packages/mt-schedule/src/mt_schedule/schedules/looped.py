"""Schedules that visit each rank several times: interleaved 1F1B and looped BFS."""

from __future__ import annotations

from mt_schedule.action import Action, Op, require_positive
from mt_schedule.ir import Schedule
from mt_schedule.schedules.one_pass import alternating, steady


def interleaved(
    stages: int,
    microbatches: int,
    chunks: int = 2,
    group: int | None = None,
    *,
    overlap: bool = False,
) -> Schedule:
    """Interleaved 1F1B: v chunks of the model on each rank, visited by groups of N micro-batches.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", arXiv 2104.04473, section 2.2, where N = p; larger groups as in "The Llama 3 Herd
    of Models", arXiv 2407.21783, section 3.3.2, up to N = m (breadth first). Rank r starts with
    `min(2(p - r - 1) + (v - 1)N, mv)` forwards and holds at most one activation of a chunk more.
    It takes `(vm + p - 1)(t_F + t_B)` with times of a chunk, and where m < p
    `(vp + m - 1)(t_F + t_B)`.

    With `overlap`, each forward is paired with the backward after it, as in Megatron-LM's combined
    1F1B, which hides the all-to-alls of experts. The last rank's first pair would wait for itself,
    so the warm-up has one more forward, and a rank holds one more activation. Each of the last
    rank's `vm - (v - 1)N - 1` pairs adds t_F&B to the makespan instead of t_F + t_B.

    Args:
        stages: Number of ranks, p. Chunk c of rank r is stage `c * p + r`.
        microbatches: Number of micro-batches, m.
        chunks: Number of stages on each rank, v.
        group: Number of micro-batches that visit a chunk before the next chunk's turn, N. None
            means p, or the smallest number above p that fits m, or m if m < p.
        overlap: Whether forwards and backwards are overlapped pairs.

    Raises:
        ValueError: N is not from p to m, or leaves a last group of fewer than p micro-batches.
    """
    require_positive("chunks", chunks)
    group = _group(stages, microbatches, group)
    visits = [
        (chunk, number)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for number in range(first, min(first + group, microbatches))
    ]
    ranks, peaks, pairs = [], [], []
    for rank in range(stages):
        warmup = min(2 * (stages - rank - 1) + (chunks - 1) * group + overlap, len(visits))
        forwards = [Action(Op.F, chunk * stages + rank, number) for chunk, number in visits]
        backwards = [
            Action(Op.B, (chunks - 1 - chunk) * stages + rank, number) for chunk, number in visits
        ]
        ranks.append(alternating(forwards, backwards, warmup=warmup))
        peaks.append(min(warmup + 1, len(visits)))
        pairs += steady(forwards, backwards, warmup=warmup)
    return Schedule(
        name="interleaved",
        stages=stages * chunks,
        microbatches=microbatches,
        ranks=tuple(ranks),
        peak_activations=tuple(peaks),
        pairs=frozenset(pairs) if overlap else frozenset(),
    )


def _group_sizes(stages: int, microbatches: int) -> list[int]:
    """Return the valid values of N: from p to m, with a last group of zero or at least p."""
    return [
        size
        for size in range(stages, microbatches + 1)
        if microbatches % size == 0 or microbatches % size >= stages
    ]


def _group(stages: int, microbatches: int, group: int | None) -> int:
    valid = _group_sizes(stages, microbatches)
    if group is None:
        return valid[0] if valid else microbatches
    require_positive("group", group)
    if group in valid:
        return group
    if not valid:
        raise ValueError(
            f"group is {group}, but {microbatches} micro-batches on {stages} ranks make no groups "
            f"of at least {stages}: leave group out, or use {stages} micro-batches or more"
        )
    nearest = min(valid, key=lambda size: abs(size - group))
    raise ValueError(
        f"group is {group}: with {stages} ranks and {microbatches} micro-batches it must be from "
        f"{stages} to {microbatches}, and the last group must be empty or have at least {stages} "
        f"micro-batches; the nearest valid group is {nearest}"
    )


def looped_bfs(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Looped breadth-first: every micro-batch passes a chunk before any passes the next.

    Lamy-Poirier, "Breadth-First Pipeline Parallelism", arXiv 2211.05953, figure 4. All forwards
    come before all backwards, so a rank holds all mv activations; in return the parameters of a
    chunk are gathered and its gradients reduced once. It takes as long as interleaved 1F1B.

    Args:
        stages: Number of ranks, p. Chunk c of rank r is stage `c * p + r`.
        microbatches: Number of micro-batches, m; any number.
        chunks: Number of stages on each rank, v.
    """
    require_positive("chunks", chunks)
    numbers = range(microbatches)
    ranks = []
    for rank in range(stages):
        held = range(rank, stages * chunks, stages)
        forwards = (Action(Op.F, stage, number) for stage in held for number in numbers)
        backwards = (Action(Op.B, stage, number) for stage in reversed(held) for number in numbers)
        ranks.append((*forwards, *backwards))
    return Schedule(
        name="bfs",
        stages=stages * chunks,
        microbatches=microbatches,
        ranks=tuple(ranks),
        peak_activations=(microbatches * chunks,) * stages,
    )
