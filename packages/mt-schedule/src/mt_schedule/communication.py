"""Passes over schedules: insert messages, keep only the forwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

from mt_schedule.action import Action, Op, require_kind, require_size
from mt_schedule.costs import Costs
from mt_schedule.ir import Schedule
from mt_schedule.simulator import action_times, simulate


def insert_communication(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Put sends and receives between the compute actions of a schedule.

    The schedule is simulated, and every message gets the moment at which its tensor is computed.
    Both of its ranks handle it then: after the compute actions that began before that moment, and
    before all later ones. So messages are received early rather than at the last moment. Since the
    lists of all ranks agree with one order of all events, the earliest unfinished event can always
    happen: there is no deadlock, even if a send ends only once it is received.

    All messages between two compute actions of a rank are one exchange (`Step`), whose members may
    happen at the same time; `F1 [SEND_F1 RECV_B0] B0` swaps with the next rank. The two actions of
    an overlapped pair have no messages between them.

    Args:
        schedule: A schedule. If it already communicates, it is returned unchanged.
        costs: Times of each stage; `Costs()` by default. They only decide where receives are
            placed. Times of 0 are replaced by a millionth of the longest time, so that a send
            comes after the action that computes its tensor.

    Returns:
        The same schedule with communication.

    Raises:
        ValueError: The costs do not fit the stages, or the schedule cannot complete (`check` says
            why).
    """
    if require_kind(schedule, Schedule).has_communication:
        return schedule
    costs = Costs() if costs is None else require_kind(costs, Costs)
    costs = _lasting(schedule, costs)
    # Sorted by time, messages before the computation that starts with them, then by the pair of
    # ranks, so that both ends of a message agree on the order of all messages between them.
    events: list[list[tuple[tuple[float, int, int, int], Action]]] = [[] for _ in schedule.ranks]
    for rank, timeline in enumerate(simulate(schedule, costs=costs).timeline):
        spans = iter(timeline)
        for action in schedule.ranks[rank]:
            span = next(spans)
            events[rank].append(((span.start, 1, 0, 0), action))
            send = Action(_SENDS.get(action.op, action.op), action.stage, action.microbatch)
            peer = schedule.peer(send) if send.op.is_send else None
            if peer is not None:
                moment = (span.end, 0, rank, peer)
                events[rank].append((moment, send))
                events[peer].append((moment, schedule.other_end(send)))
    ranks = (sorted(listed, key=lambda event: event[0]) for listed in events)
    return dataclasses.replace(
        schedule, ranks=tuple(tuple(action for _, action in listed) for listed in ranks)
    )


def _lasting(schedule: Schedule, costs: Costs) -> Costs:
    """Return costs of the schedule's stages in which every action before a send takes time."""
    own, times = costs.merged(schedule.depth), action_times(schedule, costs)
    stages = range(schedule.depth)
    transfer = max(own.message_bytes) / own.bandwidth  # pyright: ignore[reportArgumentType]
    least = 1e-6 * max(own.latency, transfer, *times[Op.F], *times[Op.B]) or 1.0
    inputs = [max(times[Op.I][stage], least) for stage in stages]
    return dataclasses.replace(
        own,
        forward=[max(times[Op.F][stage], least) for stage in stages],
        backward=[inputs[stage] + times[Op.W][stage] for stage in stages],
        pair_share=max(own.pair_share, 0.1),
    )


_SENDS = MappingProxyType({Op.F: Op.SEND_F, Op.B: Op.SEND_B, Op.I: Op.SEND_B})


def forward_only(schedule: Schedule, microbatches: int) -> Schedule:
    """Return the forwards of a schedule, for any number of micro-batches.

    The order of the schedule is repeated as often as needed, so there may be more micro-batches
    than in the schedule. With two directions only the first is used, as the number may be odd.

    Args:
        schedule: The schedule that gives the order of forwards.
        microbatches: Number of micro-batches of the forward-only run, at least 1.

    Returns:
        A schedule with communication and without backwards. It keeps no activations.
    """
    require_size(require_kind(schedule, Schedule).depth, microbatches)
    share = schedule.microbatches // schedule.directions
    ranks = tuple(
        tuple(
            action._replace(microbatch=number)
            for turn in range(-(-microbatches // share))
            for action in actions
            if action.op is Op.F
            and action.stage < schedule.depth
            and (number := turn * share + action.microbatch) < microbatches
        )
        for actions in schedule.ranks
    )
    changed = dataclasses.replace(
        schedule,
        name=f"{schedule.name} (forward only)",
        stages=schedule.depth,
        stage_ranks=schedule.stage_ranks[: schedule.depth],
        directions=1,
        microbatches=microbatches,
        ranks=ranks,
        peak_activations=None,
        pairs=frozenset(),
    )
    return insert_communication(changed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """An exchange, followed by a compute action.

    The exchange before the second action of an overlapped pair is empty.

    Attributes:
        exchange: Sends and receives that may happen in any order and at the same time.
        compute: The action after them; None in the last step of a rank that ends with sends.
    """

    exchange: tuple[Action, ...]
    compute: Action | None


def steps(actions: Iterable[Action]) -> list[Step]:
    """Cut a rank's actions into exchanges, each with the compute action after it."""
    result: list[Step] = []
    exchange: list[Action] = []
    for action in actions:
        if not require_kind(action, Action).op.is_message:
            result.append(Step(exchange=tuple(exchange), compute=action))
            exchange = []
        else:
            exchange.append(action)
    if exchange:
        result.append(Step(exchange=tuple(exchange), compute=None))
    return result
