"""Times a schedule without running it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mt_pipeline.action import Action, Mark, Op
from mt_pipeline.costs import Costs
from mt_pipeline.ir import Schedule


class Span(NamedTuple):
    """When one compute action ran.

    Attributes:
        action: The action.
        start: When it began.
        end: When its result was there. The two actions of an overlapped pair have the same times.
    """

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a schedule costs.

    Attributes:
        makespan: Time from the first action's start to the last one's end, in the unit of the
            times given.
        bubble: For each rank the share of the makespan in which it does not compute.
        peak_activations: For each rank the most (stage, micro-batch) pairs at once whose forward
            has begun and whose backward (B, or W where it is split) has not ended.
        peak_bytes: For each rank the most bytes that such pairs keep at once.
        timeline: For each rank when each of its compute actions ran.
    """

    makespan: float
    bubble: tuple[float, ...]
    peak_activations: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    timeline: tuple[tuple[Span, ...], ...] = field(repr=False)


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    weight: float | Sequence[float] | None = None,
    latency: float = 0.0,
    *,
    costs: Costs | None = None,
    measured: Mapping[Action, float] | None = None,
) -> Simulation:
    """Time a schedule by discrete events.

    Each rank takes its compute actions in order, each as soon as the rank is free and its input
    has arrived. Transfers overlap with computation.

    Args:
        schedule: With or without communication; only its compute actions count.
        forward: Time of one forward, for all stages or one for each. With two directions: for
            each stage of the model.
        backward: Time of one backward (input and weight gradients together), likewise.
        weight: Time of one W, the rest of `backward` being that of I. None: half of `backward`.
        latency: Time between the end of an action and its result's arrival on another rank.
        costs: All of these at once, with bandwidth and bytes; takes the place of the four above.
        measured: Times of single actions, which come before the others.

    Raises:
        ValueError: A time is negative, or the schedule cannot complete (`check` says why).
    """
    if costs is None:
        costs = Costs(forward=forward, backward=backward, weight=weight, latency=latency)
    elif (forward, backward, weight, latency) != (1.0, 2.0, None, 0.0):
        raise ValueError("costs is given beside single times: give the one or the others")
    timeline, stuck = advance(schedule, costs, measured or {})
    if stuck:
        raise ValueError(f"schedule {schedule.name!r} cannot complete; check(schedule) says why")
    makespan = max((spans[-1].end for spans in timeline if spans), default=0.0)
    memory = [peaks(schedule, actions, costs) for actions in schedule.ranks]
    return Simulation(
        makespan=makespan,
        bubble=tuple(1.0 - _busy(spans) / makespan if makespan else 0.0 for spans in timeline),
        peak_activations=tuple(count for count, _ in memory),
        peak_bytes=tuple(size for _, size in memory),
        timeline=tuple(tuple(spans) for spans in timeline),
    )


def _busy(spans: Sequence[Span]) -> float:
    total, until = 0.0, 0.0
    for span in spans:  # overlapped ones count once
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def advance(
    schedule: Schedule, costs: Costs, measured: Mapping[Action, float]
) -> tuple[list[list[Span]], dict[int, tuple[Action, Action]]]:
    """Let every rank go as far as it can.

    Returns:
        For each rank when its actions ran; and for each rank that does not reach its end the
        action that it is stuck at and the action whose result that one waits for.
    """
    run = _Run(schedule, costs, measured)
    while run.runnable:
        run.go_on(run.runnable.pop())
    stuck = {rank: (a, source_of(schedule, a)) for rank, a in enumerate(run.waits_at) if a}
    return run.timeline, stuck


def source_of(schedule: Schedule, action: Action) -> Action:
    """The compute action whose result a compute action works on; itself where that is the data."""
    op, stage, microbatch = action
    if op is Op.F:
        before = schedule.previous_stage(stage)
        return action if before is None else Action(Op.F, before, microbatch)
    if op is Op.W:
        return Action(Op.I, stage, microbatch)
    after = schedule.next_stage(stage)
    if after is None:
        return Action(Op.F, stage, microbatch)
    return Action(Op.I if schedule.is_split(after, microbatch) else Op.B, after, microbatch)


class _Run:
    """One simulation under way.

    What an action works on is a cell: the input of F, the gradient that B and I take, the leave
    that I gives to W. An action that ends fills the cell of the one that it feeds with the time of
    arrival, and wakes the rank that waits for it.
    """

    def __init__(self, schedule: Schedule, costs: Costs, measured: Mapping[Action, float]) -> None:
        size = schedule.stages * schedule.microbatches
        self._schedule, self._costs, self._measured = schedule, costs, measured
        self._times = action_times(schedule, costs)
        self._message_bytes = _listed(costs, "message_bytes", schedule)
        inputs: list[float | None] = [None] * size
        gradients, leaves = inputs.copy(), inputs.copy()
        self._cells = {Op.F: inputs, Op.B: gradients, Op.I: gradients, Op.W: leaves}
        for first in range(0, schedule.stages, schedule.depth):
            for number in schedule.microbatches_of(first):
                inputs[first * schedule.microbatches + number] = 0.0
        self._recomputed = {a for mark, a in schedule.marks if mark is Mark.RECOMPUTE}
        self._links: dict[tuple[int, int], float] = {}
        self._plans = [[a for a in rank if a.op in self._times] for rank in schedule.ranks]
        self.timeline: list[list[Span]] = [[] for _ in self._plans]
        self.waits_at: list[Action | None] = [None] * len(self._plans)
        self.runnable = list(range(len(self._plans)))

    def go_on(self, rank: int) -> None:
        """Take the actions of a rank until one's input is not there."""
        plan, spans = self._plans[rank], self.timeline[rank]
        overlap_of, microbatches = self._schedule.overlap_of, self._schedule.microbatches
        self.waits_at[rank] = None
        free = spans[-1].end if spans else 0.0
        while len(spans) < len(plan):
            unit = plan[len(spans) : len(spans) + 1]
            if overlap_of and plan[len(spans) + 1 :][:1] == [overlap_of.get(unit[0])]:
                unit.append(plan[len(spans) + 1])
            start = free
            for action in unit:
                ready = self._cells[action.op][action.stage * microbatches + action.microbatch]
                if ready is None:
                    self.waits_at[rank] = action
                    return
                start = max(start, ready)
            free = start + self._duration(unit)
            for action in unit:
                spans.append(Span(action, start, free))
                self._feed(rank, action, free)

    def _duration(self, unit: Sequence[Action]) -> float:
        total = 0.0
        for action in unit:
            time = self._times[action.op][action.stage]
            if self._recomputed and action.op in (Op.B, Op.I):
                again = Action(Op.F, action.stage, action.microbatch)
                time += self._times[Op.F][action.stage] if again in self._recomputed else 0.0
            total += self._measured.get(action, time) if self._measured else time
        return total if len(unit) == 1 else total * self._costs.overlap

    def _feed(self, rank: int, action: Action, end: float) -> None:
        """Fill the cells of what works on an action's result."""
        op, stage, microbatch = action
        if op is Op.W:
            return
        if op is Op.I:
            self._fill(rank, Action(Op.W, stage, microbatch), end)
        forward = op is Op.F
        after = (
            self._schedule.next_stage(stage) if forward else self._schedule.previous_stage(stage)
        )
        if after is not None:
            at = self._arrival(rank, after, self._message_bytes[min(stage, after)], end)
            self._fill(rank, Action(op, after, microbatch), at)
        elif forward:
            self._fill(rank, Action(Op.B, stage, microbatch), end)

    def _fill(self, rank: int, action: Action, at: float) -> None:
        cells = self._cells[action.op]
        cells[action.stage * self._schedule.microbatches + action.microbatch] = at
        holder = self._schedule.stage_ranks[action.stage]
        waiting = self.waits_at[holder]
        if (
            waiting is not None
            and waiting[1:] == action[1:]
            and self._cells[waiting.op] is cells
            and holder != rank
        ):
            self.waits_at[holder] = None
            self.runnable.append(holder)

    def _arrival(self, rank: int, stage: int, size: float, end: float) -> float:
        """When a result reaches another stage; messages queue on the link of two ranks."""
        link = (rank, self._schedule.stage_ranks[stage])
        if link[0] == link[1]:
            return end
        if size and self._costs.bandwidth != math.inf:
            end = max(end, self._links.get(link, 0.0)) + size / self._costs.bandwidth
            self._links[link] = end
        return end + self._costs.latency


def action_times(schedule: Schedule, costs: Costs) -> dict[Op, list[float]]:
    """The time of each compute operation at each stage, of all directions."""
    backward = _listed(costs, "backward", schedule)
    weight = _listed(costs, "weight", schedule)
    return {
        Op.F: _listed(costs, "forward", schedule),
        Op.B: backward,
        Op.I: [both - part for both, part in zip(backward, weight, strict=True)],
        Op.W: weight,
    }


def _listed(costs: Costs, what: str, schedule: Schedule) -> list[float]:
    return list(getattr(costs.spread(schedule.depth), what)) * schedule.directions


def peaks(schedule: Schedule, actions: Iterable[Action], costs: Costs) -> tuple[int, float]:
    """The most live activations of one rank's actions, and the most bytes that they keep."""
    kept = _listed(costs, "activation_bytes", schedule)
    message = _listed(costs, "message_bytes", schedule)
    marks = {action: mark for mark, action in schedule.marks if mark is not Mark.DEFER}
    live = peak = 0
    size = most = 0.0
    for action in actions:
        if action.op not in (Op.F, Op.B, Op.W):
            continue
        begins = action.op is Op.F
        mark = marks.get(Action(Op.F, *action[1:])) if marks else None
        own = kept[action.stage] if mark is None else 0.0
        before = schedule.previous_stage(action.stage)
        if mark is Mark.RECOMPUTE and before is not None:
            own = message[before]
        live += 1 if begins else -1
        size += own if begins else -own
        peak, most = max(peak, live), max(most, size)
    return peak, most
