"""A pass that defers weight gradients to the end of their rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from mt_schedule.action import Action, Op, require_kind
from mt_schedule.ir import Schedule


def defer_weights(schedule: Schedule, actions: Collection[Action] | None = None) -> Schedule:
    """Defer weight gradients to the end of their rank.

    Each W moves to the end of its rank; each B is split into an I, which stays in its place, and a
    W, which moves. Until then the activation is kept.
    This is Megatron-LM's delayed weight gradient: input gradients leave sooner, and weight
    gradients are computed while a rank would wait for the last backwards of other ranks.

    Args:
        schedule: A schedule, with or without communication.
        actions: The B and W actions to defer; None defers all.

    Returns:
        The reordered schedule. It declares no peak, as activations are kept for longer.

    Raises:
        ValueError: One of the actions is not a B or W of the schedule.
    """
    present = {
        action for _, _, action in require_kind(schedule, Schedule) if action.op in (Op.B, Op.W)
    }
    late = present if actions is None else set(actions)
    for action in late - present:
        raise ValueError(f"{action} cannot be deferred: the schedule has no such B or W")
    return dataclasses.replace(
        schedule,
        ranks=tuple(_put_off(actions, late) for actions in schedule.ranks),
        peak_activations=None,
        pairs=frozenset(
            (first, _first_half(second) if second in late else second)
            for first, second in schedule.pairs
        ),
    )


def _put_off(actions: Iterable[Action], late: Collection[Action]) -> tuple[Action, ...]:
    done: list[Action] = []
    waiting: list[Action] = []
    for action in actions:
        if action in late:
            waiting.append(action._replace(op=Op.W))
            done += [_first_half(action)] if action.op is Op.B else []
        else:
            done.append(action)
    return (*done, *waiting)


def _first_half(backward: Action) -> Action:
    return backward._replace(op=Op.I)
