"""Placement of weight gradients (W) where a rank would otherwise wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mt_schedule.action import Action, Op


def fill_weights(
    orders: Sequence[Sequence[Action]],
    stage_ranks: Sequence[int],
    limit: int,
    *,
    early: bool = False,
) -> tuple[tuple[Action, ...], ...]:
    """Put the W actions where a rank would wait, or where its memory is full.

    Every action is assumed to take one unit of time. A rank takes the next action of its order as
    soon as the input is there; otherwise it takes the oldest remaining W.

    Args:
        orders: The F and I of each rank in order.
        stage_ranks: The rank of each stage.
        limit: Largest number of activations that a rank may hold.
        early: Whether a rank without a W may take the next F of its first stage before its turn.
            It may then hold one activation less than `limit`, so that its other stages can go on.

    Returns:
        The orders with W inserted.
    """
    ranks = range(len(orders))
    todo = [deque(order) for order in orders]
    weights: list[deque[Action]] = [deque() for _ in ranks]
    live = [0 for _ in ranks]
    done: set[Action] = set()
    filled: list[list[Action]] = [[] for _ in ranks]

    def choose(rank: int) -> Action | None:
        order = todo[rank]
        full = live[rank] == limit
        if order and not (full and order[0].op is Op.F) and _has_input(order[0], stage_ranks, done):
            return order.popleft()
        if weights[rank]:
            return weights[rank].popleft()
        if early and live[rank] < limit - 1:
            first = next((a for a in order if a.op is Op.F and a.stage == rank), None)
            if first is not None and _has_input(first, stage_ranks, done):
                order.remove(first)
                return first
        return None

    while any(todo) or any(weights):
        chosen = [action for rank in ranks if (action := choose(rank)) is not None]
        assert chosen, f"orders cannot complete with {limit} activations"  # noqa: S101 (our slip)
        # All ranks chose before any result appears: an action ends at the next unit of time.
        for action in chosen:
            rank = stage_ranks[action.stage]
            filled[rank].append(action)
            done.add(action)
            live[rank] += {Op.F: 1, Op.W: -1}.get(action.op, 0)
            if action.op is Op.I:
                weights[rank].append(Action(Op.W, action.stage, action.microbatch))
    return tuple(tuple(actions) for actions in filled)


def _has_input(action: Action, stage_ranks: Sequence[int], done: set[Action]) -> bool:
    op, stage, number = action
    if op is Op.F:
        return stage == 0 or Action(Op.F, stage - 1, number) in done
    if stage == len(stage_ranks) - 1:
        return Action(Op.F, stage, number) in done
    return Action(Op.I, stage + 1, number) in done
