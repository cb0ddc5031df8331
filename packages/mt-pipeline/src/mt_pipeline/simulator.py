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
    todo = [[a for a in actions if a.op.is_compute] for actions in schedule.ranks]
    timeline: list[list[Span]] = [[] for _ in todo]
    ends: dict[Action, float] = {}
    waiting: dict[Action, int] = {}  # for the result of an action: the rank that is stuck on it
    runnable = list(range(len(todo)))
    while runnable:
        rank = runnable.pop()
        spans, free = timeline[rank], timeline[rank][-1].end if timeline[rank] else 0.0
        while len(spans) < len(todo[rank]):
            action = todo[rank][len(spans)]
            source = _source(schedule, action)
            if source is not None and source not in ends:
                waiting[source] = rank
                break
            start = free
            if source is not None:
                away = schedule.stage_ranks[source.stage] != rank
                start = max(free, ends[source] + (latency if away else 0.0))
            free = start + cost[action.op][action.stage]
            spans.append(Span(action, start, free))
            ends[action] = free
            if action in waiting:
                runnable.append(waiting.pop(action))
    if any(len(spans) < len(plan) for spans, plan in zip(timeline, todo, strict=True)):
        raise ValueError(f"schedule {schedule.name!r} cannot complete; check(schedule) says why")
    makespan = max(ends.values(), default=0.0)
    busy = [sum(span.end - span.start for span in spans) for spans in timeline]
    return Simulation(
        makespan=makespan,
        bubble=tuple(1.0 - work / makespan if makespan else 0.0 for work in busy),
        peak_activations=tuple(_peak(plan) for plan in todo),
        timeline=tuple(tuple(spans) for spans in timeline),
    )


def _source(schedule: Schedule, action: Action) -> Action | None:
    """The action whose result this one works on."""
    if action.op is Op.F:
        stage = schedule.previous_stage(action.stage)
        return None if stage is None else Action(Op.F, stage, action.microbatch)
    stage = schedule.next_stage(action.stage)
    if stage is None:
        return Action(Op.F, action.stage, action.microbatch)
    return Action(Op.B, stage, action.microbatch)


def _peak(actions: Sequence[Action]) -> int:
    peak = live = 0
    for action in actions:
        live += 1 if action.op is Op.F else -1
        peak = max(peak, live)
    return peak


def _per_stage(what: str, time: float | Sequence[float], stages: int) -> list[float]:
    times = [float(time)] * stages if isinstance(time, int | float) else [float(t) for t in time]
    if len(times) != stages:
        raise ValueError(f"{what} has {len(times)} times for {stages} stages: give one per stage")
    if any(t < 0 for t in times):
        raise ValueError(f"{what} is {time}: times are 0 or more")
    return times
