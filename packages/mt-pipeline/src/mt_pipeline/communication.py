"""Passes that turn what is computed into what is also sent, and into forward-only orders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from mt_pipeline.ir import Action, Op, Schedule
from mt_pipeline.simulator import simulate


def insert_communication(
    schedule: Schedule, *, forward: float = 1.0, backward: float = 2.0
) -> Schedule:
    """Put sends and receives between the compute actions of a schedule.

    The schedule is simulated, and every message gets the moment at which it is made. Each of its
    two ranks takes it then: after the compute actions that have begun by that moment, before the
    ones that have not. So messages are received early rather than when they are needed, and as
    there is one order of all events that every rank's list agrees with, the earliest event not
    done can always happen: no deadlock, even where a send ends only once it is received.

    What lies between two compute actions of a rank is one exchange (`Step`), whose members may
    happen at the same time; `F1 [SEND_F1 RECV_B0] B0` swaps with the next rank.

    Args:
        schedule: Compute actions only. A schedule that already communicates is returned as it is.
        forward: Time of one forward, above 0. The times only decide where receives are placed.
        backward: Time of one backward, above 0.

    Returns:
        The same schedule with communication.

    Raises:
        ValueError: A time is not above 0, or the schedule cannot complete (`check` says why).
    """
    if schedule.has_communication:
        return schedule
    if forward <= 0 or backward <= 0:
        raise ValueError(f"forward is {forward} and backward {backward}: both must be above 0")
    # Sorted by time, messages before the computation that starts with them, then by the pair of
    # ranks, so that both ends of a message agree on the order of all messages between them.
    events: list[list[tuple[tuple[float, int, int, int], Action]]] = [[] for _ in schedule.ranks]
    for rank, spans in enumerate(simulate(schedule, forward, backward).timeline):
        for span in spans:
            done = span.action
            events[rank].append(((span.start, 1, 0, 0), done))
            send = Action(Op.SEND_F if done.op is Op.F else Op.SEND_B, done.stage, done.microbatch)
            peer = schedule.peer(send)
            if peer is not None:
                moment = (span.end, 0, rank, peer)
                events[rank].append((moment, send))
                events[peer].append((moment, schedule.other_end(send)))
    ranks = (sorted(listed, key=lambda event: event[0]) for listed in events)
    return dataclasses.replace(
        schedule, ranks=tuple(tuple(action for _, action in listed) for listed in ranks)
    )


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


def steps(actions: Iterable[Action]) -> list[Step]:
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
