"""Schedules that overlap a forward with a backward: DualPipe and DualPipeV."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from mt_schedule.action import Action, Op
from mt_schedule.ir import Schedule
from mt_schedule.split import place_stages

_Locate: TypeAlias = Callable[[int, int], tuple[int, int]]  # chunk, number -> stage, micro-batch


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

    def locate(rank: int) -> _Locate:
        # Of chunk 0 and 1 each rank's first is the one whose data starts at its own end.
        near = 0 if rank < stages // 2 else 1
        held = (rank, 2 * stages - 1 - rank)

        def at(chunk: int, number: int) -> tuple[int, int]:
            direction = near if chunk == 0 else 1 - near
            return held[direction], direction * half + number

        return at

    lists = [
        _eight_phases(stages // 2, min(rank, stages - 1 - rank), half, locate(rank))
        for rank in range(stages)
    ]
    return Schedule(
        name="dualpipe",
        stages=2 * stages,
        microbatches=microbatches,
        directions=2,
        ranks=tuple(tuple(action for unit in units for action in unit) for units in lists),
        stage_ranks=place_stages(stages, 2, v_shape=True),
        peak_activations=(stages + 1,) * stages,
        pairs=frozenset((u[0], u[1]) for units in lists for u in units if len(u) == 2),
    )


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

    def locate(rank: int) -> _Locate:
        held = (rank, 2 * stages - 1 - rank)
        return lambda chunk, number: (held[chunk], number)

    lists = [_eight_phases(stages, rank, microbatches, locate(rank)) for rank in range(stages)]
    return Schedule(
        name="dualpipe-v",
        stages=2 * stages,
        microbatches=microbatches,
        ranks=tuple(tuple(action for unit in units for action in unit) for units in lists),
        stage_ranks=place_stages(stages, 2, v_shape=True),
        peak_activations=(2 * stages + 1,) * stages,
        pairs=frozenset((u[0], u[1]) for units in lists for u in units if len(u) == 2),
    )


def phase_lengths(ranks: int, rank: int, microbatches: int) -> tuple[int, ...]:
    """How often a rank repeats each of the eight phases."""
    rest = ranks - rank - 1
    main = microbatches - 2 * ranks + rank + 1
    return (2 * rest, rank + 1, rest, main, rest, rank + 1, rest, rank + 1)


def _eight_phases(
    ranks: int, rank: int, microbatches: int, locate: _Locate
) -> list[tuple[Action, ...]]:
    """What a rank does: single actions, and pairs to be overlapped.

    Chunk 0 comes before chunk 1 on the data's way, which turns at the last of the ranks.
    """
    n = phase_lengths(ranks, rank, microbatches)
    counter = _Counter(locate)
    forward, backward, weight = counter.forward, counter.backward, counter.weight
    units: list[tuple[Action, ...]] = []
    units += [(forward(0),) for _ in range(n[0])]
    for _ in range(n[1]):
        units += [(forward(0),), (forward(1),)]
    for _ in range(n[2]):
        units += [(backward(1, split=True),), (weight(),), (forward(1),)]
    for turn in range(n[3]):
        pair = (forward(0), backward(1))
        # The last rank's first pair would wait for both, while the ranks before it wait for its F.
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


class _Counter:
    """Gives the next action of each kind of one rank; W in the order of the split backwards."""

    def __init__(self, locate: _Locate) -> None:
        self._locate = locate
        self._numbers = {(is_forward, chunk): 0 for is_forward in (True, False) for chunk in (0, 1)}
        self._split: deque[Action] = deque()

    def forward(self, chunk: int) -> Action:
        """The next forward of a chunk."""
        return Action(Op.F, *self._next(chunk, is_forward=True))

    def backward(self, chunk: int, *, split: bool = False) -> Action:
        """The next backward of a chunk, or its first half."""
        action = Action(Op.I if split else Op.B, *self._next(chunk, is_forward=False))
        if split:
            self._split.append(action)
        return action

    def weight(self) -> Action:
        """The oldest second half that is left."""
        return self._split.popleft()._replace(op=Op.W)

    def _next(self, chunk: int, *, is_forward: bool) -> tuple[int, int]:
        number = self._numbers[is_forward, chunk]
        self._numbers[is_forward, chunk] += 1
        return self._locate(chunk, number)
