"""Simulation of a schedule by discrete events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from mt_schedule.action import Action, Op, require_kind
from mt_schedule.costs import Costs
from mt_schedule.ir import Schedule


class Span(NamedTuple):
    """The times of one compute action.

    Attributes:
        action: The action.
        start: Start time.
        end: Time of its result. The two actions of an overlapped pair have the same times.
    """

    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """The times of the compute actions of each rank; a stuck rank has fewer times."""

    plans: list[list[Action]]
    starts: list[list[float]]
    ends: list[list[float]]

    def stuck_at(self, rank: int) -> Action | None:
        """Return the first action of a rank that did not run."""
        plan, ran = self.plans[rank], len(self.ends[rank])
        return plan[ran] if ran < len(plan) else None


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long a rank computed, given the starts and ends of its actions in order."""
    total, until = 0.0, 0.0
    for start, end in spans:
        if start >= until:
            total += end - start
        elif end > until:  # overlapped time counts once
            total += end - until
        until = max(until, end)
    return total


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The simulated time and memory of a schedule.

    Attributes:
        makespan: Time from the start of the first action to the end of the last one, in the unit
            of the costs.
        longest_rank: The longest time from a rank's first action to its last. This is the time of
            a step if each rank begins the next step as soon as it is done, as the zero-bubble
            papers count.
        bubble: The share of the makespan in which each rank does not compute.
        peak_activations: For each rank, the largest number of (stage, micro-batch) pairs whose
            forward has begun and whose backward (B, or W if it is split) has not ended.
        peak_bytes: For each rank, the largest number of bytes that such pairs keep.
    """

    makespan: float
    longest_rank: float
    bubble: tuple[float, ...]
    peak_activations: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    _timeline: Timeline = field(repr=False)

    @cached_property
    def timeline(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of the compute actions of each rank."""
        return tuple(tuple(map(Span, *rank)) for rank in zip(*self._timeline, strict=True))


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Simulate a schedule by discrete events.

    Each rank takes its compute actions in order, each as soon as the rank is free and the input
    has arrived. Transfers overlap with computation.

    Args:
        schedule: A schedule, with or without communication; only its compute actions count.
        costs: Times, bytes and links; by default `Costs()`, a forward of 1 and a backward of 2. If
            there are costs of more pieces than stages, neighbouring pieces are joined.

    Raises:
        ValueError: The schedule cannot complete (`check` says why).
    """
    require_kind(schedule, Schedule)
    costs = Costs() if costs is None else require_kind(costs, Costs)
    _require_places(schedule)
    timeline = advance(schedule, costs)
    ranks = range(len(schedule.ranks))
    if any(timeline.stuck_at(rank) for rank in ranks):
        raise ValueError(f"schedule {schedule.name!r} cannot complete; check(schedule) says why")
    makespan = max((ends[-1] for ends in timeline.ends if ends), default=0.0)
    edges = list(zip(timeline.starts, timeline.ends, strict=True))
    work = [busy(zip(starts, ends, strict=True)) for starts, ends in edges]
    memory = peaks(schedule, costs)
    return Simulation(
        makespan=makespan,
        longest_rank=max((ends[-1] - starts[0] for starts, ends in edges if ends), default=0.0),
        bubble=tuple(1.0 - time / makespan if makespan else 0.0 for time in work),
        peak_activations=tuple(count for count, _ in memory),
        peak_bytes=tuple(size for _, size in memory),
        _timeline=timeline,
    )


def _require_places(schedule: Schedule) -> None:
    stages, microbatches = schedule.stages, schedule.microbatches
    for rank, _, action in schedule:
        if not (0 <= action.stage < stages and 0 <= action.microbatch < microbatches):
            raise ValueError(
                f"schedule {schedule.name!r} has {action} on rank {rank}, but there is no such "
                f"stage or micro-batch; check(schedule) lists all errors"
            )


def advance(schedule: Schedule, costs: Costs) -> Timeline:
    """Let every rank go as far as it can, even if the schedule is wrong."""
    return _Events(schedule, costs).result()


def source_of(schedule: Schedule, action: Action) -> Action:
    """Return the action whose result is the input of another; itself if the input is data."""
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


class _Edge(NamedTuple):
    """The destination of the results of a stage's F, or of its B and I."""

    cells: list[float | None]
    stage: int
    rank: int
    is_away: bool
    size: float


class _Events:
    """The state of a running simulation.

    Each action waits for one cell: F for its input, B and I for their gradient, W for its I. The
    cell holds the arrival time of the input, or None while it is unknown. An action that ends
    fills the cell of its consumer, and wakes the rank that waits for the cell.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule, self._costs = schedule, costs
        self._times = action_times(schedule, costs)
        inputs: list[float | None] = [None] * (schedule.stages * schedule.microbatches)
        gradients, halves = inputs.copy(), inputs.copy()
        for first in range(0, schedule.stages, schedule.depth):
            for number in schedule.microbatches_of(first):
                inputs[first * schedule.microbatches + number] = 0.0
        self._cells = {Op.F: inputs, Op.B: gradients, Op.I: gradients, Op.W: halves}
        self._edges = self._connect(inputs, gradients)
        # As in the executor, two actions overlap only if no other action is between them.
        self._pairs = {
            first
            for actions in (schedule.ranks if schedule.pairs else ())
            for first, second in pairwise(actions)
            if schedule.pair_of.get(first) == second
        }
        self._links: dict[tuple[int, int], float] = {}
        self._plans = [[a for a in rank if a.op in self._times] for rank in schedule.ranks]
        # The empty cell that each waiting rank waits for.
        self._waits: list[tuple[list[float | None], int] | None] = [None] * len(self._plans)
        self._runnable = deque(range(len(self._plans)))
        # Start and end of each action, as plain numbers: millions of spans would keep the garbage
        # collector busy.
        self._starts: list[list[float]] = [[] for _ in self._plans]
        self._ends: list[list[float]] = [[] for _ in self._plans]

    def result(self) -> Timeline:
        """Let every rank go as far as it can."""
        programs = [self._program(rank) for rank in range(len(self._plans))]
        while self._runnable:
            next(programs[self._runnable.popleft()], None)
        return Timeline(self._plans, self._starts, self._ends)

    def _connect(
        self, inputs: list[float | None], gradients: list[float | None]
    ) -> dict[Op, list[_Edge | None]]:
        schedule, sizes = self._schedule, _listed(self._costs, "message_bytes", self._schedule)

        def edge(stage: int, other: int | None, cells: list[float | None]) -> _Edge | None:
            if other is None:
                return None
            rank = schedule.stage_ranks[other]
            is_away = rank != schedule.stage_ranks[stage]
            return _Edge(cells, other, rank, is_away, sizes[min(stage, other)])

        stages = range(schedule.stages)
        down = [edge(s, schedule.next_stage(s), inputs) or edge(s, s, gradients) for s in stages]
        up = [edge(s, schedule.previous_stage(s), gradients) for s in stages]
        return {Op.F: down, Op.B: up, Op.I: up, Op.W: [None for _ in stages]}

    def _program(self, rank: int) -> Iterator[None]:
        """Take the actions of a rank; pause while an input is missing."""
        starts, ends, pairs = self._starts[rank], self._ends[rank], self._pairs
        times, cells, microbatches = self._times, self._cells, self._schedule.microbatches
        free, pair = 0.0, None
        for action in self._plans[rank]:
            op, stage, microbatch = action
            cell = stage * microbatches + microbatch
            while (start := cells[op][cell]) is None:
                self._waits[rank] = (cells[op], cell)
                yield
            if start < free:
                start = free
            duration = times[op][stage]
            if action in pairs:
                pair = (action, start, duration)
                continue
            if pair is not None:
                first, begun, more = pair
                start, pair = max(start, begun), None
                duration = (duration + more) * self._costs.pair_share
                starts.append(start)
                ends.append(start + duration)
                self._feed(rank, first, start + duration)
            free = start + duration
            starts.append(start)
            ends.append(free)
            self._feed(rank, action, free)

    def _feed(self, rank: int, action: Action, end: float) -> None:
        """Fill the cells of the actions that use an action's result."""
        op, stage, microbatch = action
        if op is Op.I:
            self._cells[Op.W][stage * self._schedule.microbatches + microbatch] = end
        edge = self._edges[op][stage]
        if edge is None:
            return
        cells, other, holder, is_away, size = edge
        if is_away:
            if size and self._costs.bandwidth != math.inf:  # messages queue on the ranks' link
                end = max(end, self._links.get((rank, holder), 0.0)) + size / self._costs.bandwidth
                self._links[rank, holder] = end
            end += self._costs.latency
        cell = other * self._schedule.microbatches + microbatch
        cells[cell] = end
        waits = self._waits[holder]
        if waits is not None and waits[1] == cell and waits[0] is cells:
            self._waits[holder] = None
            self._runnable.append(holder)


def action_times(schedule: Schedule, costs: Costs) -> dict[Op, list[float]]:
    """Return the time of each compute operation at each stage, in all directions."""
    backward = _listed(costs, "backward", schedule)
    weight = _listed(costs, "weight", schedule)
    return {
        Op.F: _listed(costs, "forward", schedule),
        Op.B: backward,
        Op.I: [both - part for both, part in zip(backward, weight, strict=True)],
        Op.W: weight,
    }


def _listed(costs: Costs, what: str, schedule: Schedule) -> list[float]:
    return list(getattr(costs.merged(schedule.depth), what)) * schedule.directions


def peaks(schedule: Schedule, costs: Costs) -> list[tuple[int, float]]:
    """Return the peak number of live activations of each rank, and their peak size in bytes."""
    kept = _listed(costs, "activation_bytes", schedule)
    found = []
    for actions in schedule.ranks:
        live = peak = 0
        size = most = 0.0
        for op, stage, _ in actions:
            if op not in _LIVES:
                continue
            if op is Op.F:
                live += 1
                size += kept[stage]
                if live > peak or size > most:
                    peak, most = max(peak, live), max(most, size)
            else:
                live -= 1
                size -= kept[stage]
        found.append((peak, most))
    return found


_LIVES = frozenset({Op.F, Op.B, Op.W})  # begin or end the life of an activation
