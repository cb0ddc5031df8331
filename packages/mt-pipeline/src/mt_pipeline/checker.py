"""Proves a schedule complete, ordered, deadlock-free and within its memory, without running it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from mt_pipeline.communication import Located, locate_communication, steps
from mt_pipeline.ir import Action, Op, Schedule

_Channel: TypeAlias = tuple[int, int]  # from rank, to rank
_Order: TypeAlias = list[list[Located]]


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is wrong with a schedule.

    Attributes:
        rank: The rank whose list it is in.
        index: Index into that rank's list. For an action that is missing: where it is needed, or
            the length of the list if nothing after it needs it.
        sentence: What is wrong, for a person.
    """

    rank: int
    index: int
    sentence: str

    def __str__(self) -> str:
        return f"rank {self.rank}, action {self.index}: {self.sentence}"


def check(schedule: Schedule, *, buffers: int = 0) -> list[Violation]:
    """Find everything that is wrong with a schedule.

    Checked are: every stage and micro-batch has each of its actions once and on its rank; what an
    action needs comes before it; the sends of one rank to another and the receives there are the
    same messages in the same order; no deadlock when a rank goes on only after its whole exchange
    (`Step`) is done and a send only ends once it is received, or one of `buffers` holds it; and
    never more live activations than the schedule promises. Deadlock is looked for where the
    messages match, as it is beyond doubt where they do not.

    Args:
        schedule: With or without communication. Without, it is checked as `insert_communication`
            would complete it, and indices are those of the schedule given.
        buffers: How many messages from one rank to another may be under way after their send has
            ended. 0: sends block until they are received, the strictest case.

    Returns:
        The violations by rank and index; empty when the schedule is right.
    """
    if buffers < 0:
        raise ValueError(f"buffers is {buffers}: expected 0 or more")
    located = locate_communication(schedule)
    found = list(_strays(schedule, located))
    known = [
        [(action, index) for action, index in order if _astray(schedule, rank, action) is None]
        for rank, order in enumerate(located)
    ]
    first = _first_positions(known)
    found += _repeated(schedule, known, first)
    found += _missing(schedule, known, first)
    incomplete = bool(found)
    found += _disordered(schedule, known, first)
    mismatched = list(_mismatched(schedule, known, first))
    found += mismatched
    if not incomplete and not mismatched:
        found += _deadlocks(schedule, known, buffers)
    found += _over_peak(schedule, known)
    unique = dict.fromkeys(found)
    return sorted(unique, key=lambda violation: (violation.rank, violation.index))


def _astray(schedule: Schedule, rank: int, action: Action) -> str | None:
    """Why an action cannot be where it is, whatever surrounds it."""
    if not 0 <= action.stage < schedule.stages:
        return f"{action}: there are stages 0..{schedule.stages - 1} only"
    if not 0 <= action.microbatch < schedule.microbatches:
        return f"{action}: there are micro-batches 0..{schedule.microbatches - 1} only"
    if schedule.stage_ranks[action.stage] != rank:
        return f"{action}: that stage is on rank {schedule.stage_ranks[action.stage]}"
    if not action.op.is_compute and schedule.peer(action) is None:
        return f"{action}: there is no other rank at that side of the stage"
    return None


def _strays(schedule: Schedule, located: _Order) -> Iterator[Violation]:
    for rank, order in enumerate(located):
        for action, index in order:
            reason = _astray(schedule, rank, action)
            if reason is not None and (action.op.is_compute or schedule.has_communication):
                yield Violation(rank, index, reason)


def _first_positions(known: _Order) -> dict[Action, int]:
    """Where in its rank's completed list each action first stands."""
    first: dict[Action, int] = {}
    for order in known:
        for position, (action, _) in enumerate(order):
            first.setdefault(action, position)
    return first


def _repeated(schedule: Schedule, known: _Order, first: dict[Action, int]) -> Iterator[Violation]:
    for rank, order in enumerate(known):
        for position, (action, index) in enumerate(order):
            given = action.op.is_compute or schedule.has_communication
            if given and first[action] != position:
                earlier = order[first[action]][1]
                yield Violation(rank, index, f"{action} is already action {earlier} of this rank")


def _needs(schedule: Schedule, action: Action) -> Iterator[Action]:
    """What has to come before an action on its own rank."""
    op, stage, microbatch = action.op, action.stage, action.microbatch
    if op is Op.F:
        source, receive = schedule.previous_stage(stage), Op.RECV_F
    elif op is Op.B:
        yield Action(Op.F, stage, microbatch)
        source, receive = schedule.next_stage(stage), Op.RECV_B
    elif op.is_send:
        yield Action(Op.F if op is Op.SEND_F else Op.B, stage, microbatch)
        return
    else:
        return
    if source is None:
        return
    if schedule.stage_ranks[source] == schedule.stage_ranks[stage]:
        yield Action(op, source, microbatch)
    else:
        yield Action(receive, stage, microbatch)


def _required(schedule: Schedule) -> Iterator[Action]:
    """Every action that a complete schedule has once."""
    for stage in range(schedule.stages):
        ops = [op for op in Op if op.is_compute or schedule.peer(Action(op, stage, 0)) is not None]
        for op, microbatch in itertools.product(ops, range(schedule.microbatches)):
            yield Action(op, stage, microbatch)


def _missing(schedule: Schedule, known: _Order, first: dict[Action, int]) -> Iterator[Violation]:
    absent = {action for action in _required(schedule) if action not in first}
    if not schedule.has_communication:  # its communication is absent because the computation is
        absent = {action for action in absent if action.op.is_compute}
    needed_at: dict[Action, int] = {}
    for order in known:
        for action, index in order:
            for need in _needs(schedule, action):
                if need in absent:
                    needed_at.setdefault(need, index)
    for action in sorted(absent, key=lambda a: (a.stage, a.microbatch, a.op)):
        rank = schedule.stage_ranks[action.stage]
        index = needed_at.get(action, len(schedule.ranks[rank]))
        yield Violation(rank, index, f"{action} is missing on this rank")


def _disordered(schedule: Schedule, known: _Order, first: dict[Action, int]) -> Iterator[Violation]:
    for rank, order in enumerate(known):
        for position, (action, index) in enumerate(order):
            for need in _needs(schedule, action):
                if first.get(need, -1) > position:
                    at = order[first[need]][1]
                    yield Violation(rank, index, f"{action} needs {need}, which is action {at}")


def _mismatched(schedule: Schedule, known: _Order, first: dict[Action, int]) -> Iterator[Violation]:
    """The first message of each channel that its two ends disagree on, at both ends."""
    sends: dict[_Channel, list[Located]] = defaultdict(list)
    receives: dict[_Channel, list[Located]] = defaultdict(list)
    for rank, order in enumerate(known):
        for position, (action, index) in enumerate(order):
            peer = None if action.op.is_compute else schedule.peer(action)
            if peer is None or first[action] != position:
                continue
            if schedule.other_end(action) not in first:
                continue  # reported as missing
            if action.op.is_send:
                sends[rank, peer].append((action, index))
            else:
                receives[peer, rank].append((action, index))
    for (source, target), sent in sends.items():
        for (send, sent_at), (receive, received_at) in zip(
            sent, receives[source, target], strict=True
        ):
            if schedule.other_end(send) != receive:
                clash = f"rank {source} sends {send} where rank {target} expects {receive}"
                yield Violation(source, sent_at, f"messages out of order: {clash}")
                yield Violation(target, received_at, f"messages out of order: {clash}")
                break


def _deadlocks(schedule: Schedule, known: _Order, buffers: int) -> Iterator[Violation]:
    """Let every rank go as far as it can; who is not at the end then never gets there.

    The k-th send of a channel belongs to its k-th receive, so counting what has been posted is
    enough: a receive is done when that many sends are posted, a send when that many receives are.
    """
    plans = [[step.exchange for step in steps(action for action, _ in order)] for order in known]
    posted: dict[tuple[bool, _Channel], int] = defaultdict(int)
    open_ops: list[list[tuple[Action, bool, _Channel, int]]] = [[] for _ in plans]
    at = [0] * len(plans)
    runnable = list(range(len(plans)))
    while runnable:
        rank = runnable.pop()
        while True:
            open_ops[rank] = [
                op
                for op in open_ops[rank]
                if posted[not op[1], op[2]] + (buffers if op[1] else 0) <= op[3]
            ]
            if open_ops[rank] or at[rank] == len(plans[rank]):
                break
            for action in plans[rank][at[rank]]:
                peer = schedule.peer(action)
                assert peer is not None, "an action without a peer was kept"  # noqa: S101
                sending = action.op.is_send
                channel = (rank, peer) if sending else (peer, rank)
                open_ops[rank].append((action, sending, channel, posted[sending, channel]))
                posted[sending, channel] += 1
                runnable.append(peer)
            at[rank] += 1
    index_of = {action: index for order in known for action, index in order}
    for rank, waiting in enumerate(open_ops):
        if waiting:
            action, _, channel, _ = waiting[0]
            peer = channel[0] if channel[1] == rank else channel[1]
            sentence = f"deadlock: {action} waits for rank {peer}, stuck at {open_ops[peer][0][0]}"
            yield Violation(rank, index_of[action], sentence)


def _over_peak(schedule: Schedule, known: _Order) -> Iterator[Violation]:
    if schedule.peak_activations is None:
        return
    for rank, (order, peak) in enumerate(zip(known, schedule.peak_activations, strict=True)):
        live: set[tuple[int, int]] = set()
        for action, index in order:
            key = (action.stage, action.microbatch)
            if action.op is Op.F:
                live.add(key)
            elif action.op is Op.B:
                live.discard(key)
            if len(live) > peak:
                yield Violation(
                    rank, index, f"{len(live)} live activations, but the schedule declares {peak}"
                )
                break
