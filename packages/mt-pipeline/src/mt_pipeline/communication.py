"""Passes that turn what is computed into what is also sent, and into forward-only orders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mt_pipeline.ir import Action, Op, Schedule

Located: TypeAlias = tuple[Action, int]
"""An action and the index of the compute action that it belongs to."""


def insert_communication(schedule: Schedule) -> Schedule:
    """Put sends and receives around the compute actions of a schedule.

    A tensor is sent right after the action that makes it and received right before the action that
    needs it. What lies between two compute actions of a rank is one exchange, whose members may
    happen in any order and at the same time; so `F1 [SEND_F1 RECV_B0] B0` swaps with the next
    stage, and no rank waits for a send while its peer waits for one too.

    Args:
        schedule: Compute actions only. A schedule that already communicates is returned as it is.

    Returns:
        The same schedule with communication.
    """
    if schedule.has_communication:
        return schedule
    ranks = tuple(tuple(a for a, _ in located) for located in locate_communication(schedule))
    return dataclasses.replace(schedule, ranks=ranks)


def locate_communication(schedule: Schedule) -> list[list[Located]]:
    """Like `insert_communication`, each action with the index that it has or comes from."""
    if schedule.has_communication:
        return [[(action, i) for i, action in enumerate(actions)] for actions in schedule.ranks]
    return [
        [(a, i) for i, action in enumerate(actions) for a in _surround(schedule, action)]
        for actions in schedule.ranks
    ]


def _surround(schedule: Schedule, action: Action) -> Iterator[Action]:
    stage, microbatch = action.stage, action.microbatch
    forward = action.op is Op.F
    receive = Action(Op.RECV_F if forward else Op.RECV_B, stage, microbatch)
    send = Action(Op.SEND_F if forward else Op.SEND_B, stage, microbatch)
    if schedule.peer(receive) is not None:
        yield receive
    yield action
    if schedule.peer(send) is not None:
        yield send


def forward_only(schedule: Schedule, microbatches: int) -> Schedule:
    """The forwards of a schedule, for any number of micro-batches.

    The schedule's own order is repeated as often as needed, so micro-batch numbers may exceed what
    the schedule was made for.

    Args:
        schedule: Where the order of forwards is taken from.
        microbatches: Number of micro-batches of the forward-only run, at least 1.

    Returns:
        A schedule with communication and without backwards. It keeps no activations.
    """
    rounds = -(-microbatches // schedule.microbatches)
    ranks = tuple(
        tuple(
            Action(Op.F, action.stage, number)
            for turn in range(rounds)
            for action in actions
            if action.op is Op.F
            and (number := turn * schedule.microbatches + action.microbatch) < microbatches
        )
        for actions in schedule.ranks
    )
    changed = dataclasses.replace(
        schedule,
        name=f"{schedule.name} (forward only)",
        microbatches=microbatches,
        ranks=ranks,
        peak_activations=None,
    )
    return insert_communication(changed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """An exchange, then a compute action.

    Attributes:
        exchange: Sends and receives that may happen in any order and at the same time.
        compute: What follows them; None in the last step of a rank, if it ends with sends.
    """

    exchange: tuple[Action, ...]
    compute: Action | None


def steps(actions: Sequence[Action] | Iterable[Action]) -> list[Step]:
    """Cut a rank's actions into exchanges, each with the compute action that follows it."""
    result: list[Step] = []
    exchange: list[Action] = []
    for action in actions:
        if action.op.is_compute:
            result.append(Step(exchange=tuple(exchange), compute=action))
            exchange = []
        else:
            exchange.append(action)
    if exchange:
        result.append(Step(exchange=tuple(exchange), compute=None))
    return result
