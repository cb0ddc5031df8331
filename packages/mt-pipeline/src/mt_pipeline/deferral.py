"""Puts weight gradients that are marked DEFER off to the end of their rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from mt_pipeline.action import Action, Mark, Op
from mt_pipeline.ir import Schedule


def defer_weights(schedule: Schedule) -> Schedule:
    """Do what the DEFER marks of a schedule ask for.

    A marked W goes to the end of its rank, and of a marked B an I stays where it is and the W goes
    there; where the stage has a REDUCE, right before that. Until then the activation is kept. It is
    Megatron-LM's delayed weight gradient: gradients of inputs leave sooner, and the weights' half
    is done while a rank would wait for the others' last backwards.

    `check`, `simulate`, `insert_communication` and `Executor` do this first, so that all of them
    mean the same order.

    Args:
        schedule: With or without communication, hooks and marks.

    Returns:
        The schedule in that order, without these marks; itself if none is on one of its actions.
        The peak that it declares stays, and `check` says so where it is not kept any more.
    """
    wanted = {action for mark, action in schedule.marks if mark is Mark.DEFER}
    late = wanted and wanted & {action for _, _, action in schedule}
    if not late:
        return schedule
    return dataclasses.replace(
        schedule,
        ranks=tuple(_put_off(actions, late) for actions in schedule.ranks),
        overlaps=frozenset(
            (first, _first_half(second) if second in late else second)
            for first, second in schedule.overlaps
        ),
        marks=schedule.marks - {(Mark.DEFER, action) for action in late},
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
