"""Proof that a schedule is complete, ordered, free of deadlock and within its memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from mt_schedule.action import Action, Op, require_kind
from mt_schedule.communication import steps
from mt_schedule.costs import Costs
from mt_schedule.ir import Schedule
from mt_schedule.simulator import advance, source_of

_Channel: TypeAlias = tuple[int, int]  # from rank, to rank
_Places: TypeAlias = Mapping[Action, int]  # index at which an action first stands in its rank


@dataclass(frozen=True, slots=True)
class Violation:
    """One error in a schedule.

    Attributes:
        rank: The rank whose list contains the error.
        index: Index into that rank's list. For a missing action: the index of the first action
            that needs it, or the length of the list if none does.
        sentence: A description for people.
    """

    rank: int
    index: int
    sentence: str

    def __str__(self) -> str:
        return f"rank {self.rank}, action {self.index}: {self.sentence}"


def check(schedule: Schedule, *, buffers: int = 0) -> list[Violation]:
    """Find all errors in a schedule.

    It checks that every stage and micro-batch has each of its actions once, on its rank; that
    every action comes after the actions it needs; that ranks do not wait for each other forever;
    and that there are never more live activations than the schedule declares. If the schedule
    communicates, it also checks that the sends of one rank to another and the receives there are
    the same messages in the same order, and that there is no deadlock if a rank goes on only after
    its whole exchange (`Step`), and a send ends only once it is received or held in one of
    `buffers`. Actions that are missing, out of order or mismatched would cause deadlocks, so with
    such errors no deadlock is searched.

    Args:
        schedule: A schedule, with or without communication.
        buffers: Number of messages from one rank to another that may be in flight after their send
            has ended. With 0, the strictest case, sends block until they are received.

    Returns:
        The violations by rank and index; empty if the schedule is right.
    """
    require_kind(schedule, Schedule)
    if buffers < 0:
        raise ValueError(f"buffers is {buffers}: expected 0 or more")
    places: dict[Action, int] = {}
    found: list[Violation] = []
    for rank, index, action in schedule:
        reason = _astray(schedule, rank, action)
        if reason is None and action in places:
            reason = f"{action} is already action {places[action]} of this rank"
        if reason is None:
            places[action] = index
        else:
            found.append(Violation(rank, index, reason))
    found += _missing(schedule, places)
    found += _doubled(schedule, places)
    found += _disordered(schedule, places)
    found += _mismatched(schedule, places)
    if not found:
        found += _stuck(schedule, places) or _deadlocks(schedule, places, buffers)
    found += _over_peak(schedule, places)
    found += _ill_paired(schedule, places)
    return sorted(found, key=lambda violation: (violation.rank, violation.index))


def _astray(schedule: Schedule, rank: int, action: Action) -> str | None:
    """Return why an action cannot be on a rank at all; None if it can."""
    if not 0 <= action.stage < schedule.stages:
        return f"{action}: there are stages 0..{schedule.stages - 1} only"
    if not 0 <= action.microbatch < schedule.microbatches:
        return f"{action}: there are micro-batches 0..{schedule.microbatches - 1} only"
    if schedule.stage_ranks[action.stage] != rank:
        return f"{action}: that stage is on rank {schedule.stage_ranks[action.stage]}"
    passing = schedule.microbatches_of(action.stage)
    if action.microbatch not in passing:
        return f"{action}: micro-batches {passing[0]}..{passing[-1]} pass that stage"
    if action.op.is_message and schedule.peer(action) is None:
        return f"{action}: there is no other rank at that side of the stage"
    return None


def _needs(schedule: Schedule, action: Action) -> Iterator[Action]:
    """Yield the actions that must come before an action on its own rank."""
    op, stage, microbatch = action
    backward = Op.I if schedule.is_split(stage, microbatch) else Op.B
    if op.is_send:
        yield Action(Op.F if op is Op.SEND_F else backward, stage, microbatch)
    if not op.is_compute:
        return
    if op in (Op.B, Op.I):
        yield Action(Op.F, stage, microbatch)
    source = source_of(schedule, action)
    if source == action or (source.stage == stage and source.op is Op.F):
        return
    if schedule.stage_ranks[source.stage] == schedule.stage_ranks[stage]:
        yield source
    elif schedule.has_communication:
        yield Action(Op.RECV_F if op is Op.F else Op.RECV_B, stage, microbatch)


def _expected(schedule: Schedule, places: _Places) -> Iterator[Action]:
    """Yield every action of a complete schedule."""
    for stage in range(schedule.stages):
        messages = [
            op
            for op in Op
            if schedule.has_communication
            and op.is_message
            and schedule.peer(Action(op, stage, 0)) is not None
        ]
        for number in schedule.microbatches_of(stage):
            split = any(Action(op, stage, number) in places for op in (Op.I, Op.W))
            for op in (Op.F, *((Op.I, Op.W) if split else (Op.B,)), *messages):
                yield Action(op, stage, number)


def _missing(schedule: Schedule, places: _Places) -> Iterator[Violation]:
    absent = [action for action in _expected(schedule, places) if action not in places]
    needed_at: dict[Action, int] = {}
    if absent:
        for action, index in places.items():
            for need in _needs(schedule, action):
                needed_at[need] = min(index, needed_at.get(need, index))
    for action in absent:
        rank = schedule.stage_ranks[action.stage]
        index = needed_at.get(action, len(schedule.ranks[rank]))
        yield Violation(rank, index, f"{action} is missing on this rank")


def _doubled(schedule: Schedule, places: _Places) -> Iterator[Violation]:
    for action in places:
        if action.op is Op.B:
            for op in (Op.I, Op.W):
                part = action._replace(op=op)
                if part in places:
                    sentence = f"{action} does what {part}, action {places[part]}, does too"
                    yield _violation(schedule, places, action, sentence)


def _disordered(schedule: Schedule, places: _Places) -> Iterator[Violation]:
    for action, index in places.items():
        for need in _needs(schedule, action):
            at = places.get(need, -1)
            if at > index:
                sentence = f"{action} needs {need}, which is action {at}"
                yield _violation(schedule, places, action, sentence)


def _mismatched(schedule: Schedule, places: _Places) -> Iterator[Violation]:
    """Yield the first message of each channel on which its two ends disagree, at both ends."""
    sends: dict[_Channel, list[Action]] = defaultdict(list)
    receives: dict[_Channel, list[Action]] = defaultdict(list)
    for action in places:  # in the order of the lists
        peer = schedule.peer(action) if action.op.is_message else None
        if peer is None or schedule.other_end(action) not in places:
            continue  # the latter is reported as missing
        rank = schedule.stage_ranks[action.stage]
        if action.op.is_send:
            sends[rank, peer].append(action)
        else:
            receives[peer, rank].append(action)
    for (source, target), sent in sends.items():
        for send, receive in zip(sent, receives[source, target], strict=True):
            if schedule.other_end(send) != receive:
                clash = f"rank {source} sends {send} where rank {target} expects {receive}"
                for end in (send, receive):
                    yield _violation(schedule, places, end, f"messages out of order: {clash}")
                break


def _stuck(schedule: Schedule, places: _Places) -> list[Violation]:
    """Find deadlocks of the computation alone, independent of messages."""
    timeline = advance(schedule, Costs(forward=0.0, backward=0.0))
    stuck = {
        rank: (action, source_of(schedule, action))
        for rank in range(len(schedule.ranks))
        if (action := timeline.stuck_at(rank)) is not None
    }
    found = []
    for action, source in stuck.values():
        peer = schedule.stage_ranks[source.stage]
        at = f"which is stuck at {stuck[peer][0]}" if peer in stuck else "which never does it"
        sentence = f"deadlock: {action} waits for {source} on rank {peer}, {at}"
        found.append(_violation(schedule, places, action, sentence))
    return found


def _deadlocks(schedule: Schedule, places: _Places, buffers: int) -> Iterator[Violation]:
    """Let every rank go as far as its exchanges allow, and report the stuck ranks.

    The k-th send of a channel belongs to its k-th receive, so counting is enough: the k-th receive
    is done once k sends are posted, and the k-th send once k receives are posted.
    """
    plans = [[step.exchange for step in steps(actions)] for actions in schedule.ranks]
    posted: dict[tuple[bool, _Channel], int] = defaultdict(int)
    # Unfinished messages of each rank's exchange: action, whether it is a send, channel, k.
    pending: list[list[tuple[Action, bool, _Channel, int]]] = [[] for _ in plans]
    at = [0] * len(plans)
    runnable = list(range(len(plans)))
    while runnable:
        rank = runnable.pop()
        while True:
            pending[rank] = [
                (action, sending, channel, number)
                for action, sending, channel, number in pending[rank]
                if posted[not sending, channel] + (buffers if sending else 0) <= number
            ]
            if pending[rank] or at[rank] == len(plans[rank]):
                break
            for action in plans[rank][at[rank]]:
                peer = _peer(schedule, action)
                sending = action.op.is_send
                channel = (rank, peer) if sending else (peer, rank)
                pending[rank].append((action, sending, channel, posted[sending, channel]))
                posted[sending, channel] += 1
                runnable.append(peer)
            at[rank] += 1
    for left in pending:
        for action, *_ in left[:1]:
            peer = _peer(schedule, action)
            sentence = f"deadlock: {action} waits for rank {peer}, stuck at {pending[peer][0][0]}"
            yield _violation(schedule, places, action, sentence)


def _peer(schedule: Schedule, action: Action) -> int:
    peer = schedule.peer(action)
    assert peer is not None, f"{action} was found astray"  # noqa: S101 (checked before)
    return peer


def _over_peak(schedule: Schedule, places: _Places) -> Iterator[Violation]:
    live: list[set[tuple[int, int]]] = [set() for _ in schedule.ranks]
    reported: set[int] = set()
    for action, index in places.items() if schedule.peak_activations is not None else ():
        rank = schedule.stage_ranks[action.stage]
        key = (action.stage, action.microbatch)
        if action.op is Op.F:
            live[rank].add(key)
        elif action.op in (Op.B, Op.W):
            live[rank].discard(key)
        count, peak = len(live[rank]), (schedule.peak_activations or ())[rank]
        if count > peak and rank not in reported:
            reported.add(rank)
            sentence = f"{count} live activations, but the schedule declares {peak}"
            yield Violation(rank, index, sentence)


def _ill_paired(schedule: Schedule, places: _Places) -> Iterator[Violation]:
    """Find pairs with missing actions, on two ranks, or with an action in two pairs.

    A pair with other actions in between is no error: the two run one after the other.
    """
    paired: set[Action] = set()
    for first, second in sorted(schedule.pairs):
        for action in (first, second):
            if action not in places:
                sentence = f"{action} is in an overlapped pair, but not in the schedule"
                yield _violation(schedule, places, action, sentence)
            elif action in paired:
                sentence = f"{action} is in two overlapped pairs"
                yield _violation(schedule, places, action, sentence)
            paired.add(action)
        if first in places and second in places:
            rank, other = (schedule.stage_ranks[action.stage] for action in (first, second))
            if rank != other:
                sentence = f"{first} cannot overlap {second}: it is on rank {other}"
                yield _violation(schedule, places, first, sentence)


def _violation(schedule: Schedule, places: _Places, action: Action, sentence: str) -> Violation:
    """Return a violation at an action's index, or at the end of its rank's list."""
    exists = 0 <= action.stage < schedule.stages
    rank = schedule.stage_ranks[action.stage] if exists else 0
    return Violation(rank, places.get(action, len(schedule.ranks[rank])), sentence)
