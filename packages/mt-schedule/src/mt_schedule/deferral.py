"""Puts weight gradients off to the end of their rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from mt_schedule.action import Action, Op, require_kind
from mt_schedule.ir import Schedule


def defer_weights(schedule: Schedule, actions: Collection[Action] | None = None) -> Schedule:
    """Have weight gradients made at the end of their rank.

    A W goes to the end of its rank, and of a B an I stays where it is and the W goes there; where
    the stage has a REDUCE, right before that. Until then the activation is kept. It is
    Megatron-LM's delayed weight gradient: gradients of inputs leave sooner, and the weights' half
    is done while a rank would wait for the others' last backwards.

    Args:
        schedule: With or without communication and hooks.
        actions: Which B and W are put off. None: all.

    Returns:
        The schedule in that order. It declares no peak, as activations are kept for longer.

    Raises:
        ValueError: One of the actions is no B or W of the schedule.
    """
    present = {
        action for _, _, action in require_kind(schedule, Schedule) if action.op in (Op.B, Op.W)
    }
    late = present if actions is None else set(actions)
    for action in late - present:
        raise ValueError(f"{action} cannot be put off: the schedule has no such B or W")
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
            continue
        if action.op is Op.REDUCE:
            done += [weight for weight in waiting if weight.stage == action.stage]
            waiting = [weight for weight in waiting if weight.stage != action.stage]
        done.append(action)
    return (*done, *waiting)


def _first_half(backward: Action) -> Action:
    return backward._replace(op=Op.I)
