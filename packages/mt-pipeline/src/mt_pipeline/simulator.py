"""Times a schedule without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mt_pipeline.ir import Action, Op, Schedule


@dataclass(frozen=True, slots=True)
class Span:
    """When one compute action ran."""

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
            has begun and whose backward has not ended.
        timeline: For each rank when each of its compute actions ran.
    """

    makespan: float
    bubble: tuple[float, ...]
    peak_activations: tuple[int, ...]
    timeline: tuple[tuple[Span, ...], ...] = field(repr=False)


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    latency: float = 0.0,
) -> Simulation:
    """Time a schedule by discrete events.

    Each rank takes its compute actions in order, each as soon as the rank is free and its input
    has arrived. Transfers overlap with computation and do not slow each other down.

    Args:
        schedule: With or without communication; only its compute actions count.
        forward: Time of one forward, for all stages or one for each.
        backward: Time of one backward (input and weight gradients), likewise.
        latency: Time between the end of an action and its result's arrival on another rank.

    Raises:
        ValueError: A time is negative, or the schedule cannot complete (`check` says why).
    """
    cost = {
        Op.F: _per_stage("forward", forward, schedule.stages),
        Op.B: _per_stage("backward", backward, schedule.stages),
    }
    if latency < 0:
        raise ValueError(f"latency is {latency}: expected 0 or more")
    timeline, stuck = advance(schedule, cost, latency)
    if stuck:
        raise ValueError(f"schedule {schedule.name!r} cannot complete; check(schedule) says why")
    makespan = max((spans[-1].end for spans in timeline if spans), default=0.0)
    busy = [sum(span.end - span.start for span in spans) for spans in timeline]
    return Simulation(
        makespan=makespan,
        bubble=tuple(1.0 - work / makespan if makespan else 0.0 for work in busy),
        peak_activations=tuple(_peak(spans) for spans in timeline),
        timeline=tuple(tuple(spans) for spans in timeline),
    )


def advance(
    schedule: Schedule, cost: dict[Op, list[float]], latency: float = 0.0
) -> tuple[list[list[Span]], dict[int, tuple[Action, Action]]]:
    """Let every rank go as far as it can.

    Returns:
        For each rank when its actions ran; and for each rank that does not reach its end the
        action that it is stuck at and the action whose result that one waits for.
    """
    plans = [[a for a in actions if a.op.is_compute] for actions in schedule.ranks]
    timeline: list[list[Span]] = [[] for _ in plans]
    ends: dict[Action, float] = {}
    waiting: dict[Action, int] = {}  # for the result of an action: the rank that is stuck on it
    stuck: dict[int, tuple[Action, Action]] = {}
    runnable = list(range(len(plans)))
    while runnable:
        rank = runnable.pop()
        plan, spans = plans[rank], timeline[rank]
        free = spans[-1].end if spans else 0.0
        stuck.pop(rank, None)
        while len(spans) < len(plan):
            action = plan[len(spans)]
            source = source_of(schedule, action)
            start = free
            if source is not None:
                if source not in ends:
                    waiting[source], stuck[rank] = rank, (action, source)
                    break
                away = schedule.stage_ranks[source.stage] != rank
                start = max(free, ends[source] + (latency if away else 0.0))
            free = start + cost[action.op][action.stage]
            spans.append(Span(action, start, free))
            ends[action] = free
            if action in waiting:
                runnable.append(waiting.pop(action))
    return timeline, stuck


def source_of(schedule: Schedule, action: Action) -> Action | None:
    """The compute action whose result a compute action works on; None for the first stage's F."""
    if action.op is Op.F:
        stage = schedule.previous_stage(action.stage)
        return None if stage is None else Action(Op.F, stage, action.microbatch)
    stage = schedule.next_stage(action.stage)
    if stage is None:
        return Action(Op.F, action.stage, action.microbatch)
    return Action(Op.B, stage, action.microbatch)


def _peak(spans: Sequence[Span]) -> int:
    peak = live = 0
    for span in spans:
        live += 1 if span.action.op is Op.F else -1
        peak = max(peak, live)
    return peak


def _per_stage(what: str, time: float | Sequence[float], stages: int) -> list[float]:
    times = [float(time)] * stages if isinstance(time, int | float) else [float(t) for t in time]
    if len(times) != stages:
        raise ValueError(f"{what} has {len(times)} times for {stages} stages: give one per stage")
    if any(t < 0 for t in times):
        raise ValueError(f"{what} is {time}: times are 0 or more")
    return times
