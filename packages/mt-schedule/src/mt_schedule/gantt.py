"""Gantt charts of a schedule's run: their content, and a drawing in characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mt_schedule.action import Action, require_kind, require_positive
from mt_schedule.ir import Schedule
from mt_schedule.simulator import Simulation, Span, busy


@dataclass(frozen=True, slots=True)
class Bar:
    """One action in a chart.

    Attributes:
        action: The action.
        start: Start time, in the run's unit of time.
        end: End time.
        lane: 0 or 1 if it shares its time with another action, else None.
    """

    action: Action
    start: float
    end: float
    lane: int | None


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart: a schedule and the times of its actions, simulated or measured.

    Attributes:
        schedule: The schedule.
        timeline: The spans of each rank: `Simulation.timeline`, or `Executor.timeline()`.
        title: Title of the chart; by default the schedule's name and sizes.
        unit: Name of the unit of time.
    """

    schedule: Schedule
    timeline: Sequence[Sequence[Span]] = field(repr=False)
    title: str = ""
    unit: str = "time of a forward"

    def __post_init__(self) -> None:
        require_kind(self.schedule, Schedule)
        if len(self.timeline) != len(self.schedule.ranks):
            raise ValueError(
                f"the timeline has {len(self.timeline)} ranks, but the schedule has "
                f"{len(self.schedule.ranks)}: give the spans of every rank"
            )
        if not self.title:
            schedule = self.schedule
            title = (
                f"{schedule.name}: {len(schedule.ranks)} ranks, {schedule.microbatches} "
                "micro-batches"
            )
            object.__setattr__(self, "title", title)

    @classmethod
    def of(cls, schedule: Schedule, simulation: Simulation, *, title: str = "") -> Panel:
        """Return the chart of a simulated run."""
        timeline = require_kind(simulation, Simulation).timeline
        return cls(schedule=schedule, timeline=timeline, title=title)

    @property
    def makespan(self) -> float:
        """The end time of the last action."""
        return max((span.end for spans in self.timeline for span in spans), default=0.0)

    def idle(self) -> float:
        """Return the share of all ranks' time in which they do not compute."""
        ranks = range(len(self.timeline))
        worked = sum(busy((bar.start, bar.end) for bar in self.bars(rank)) for rank in ranks)
        whole = self.makespan * len(ranks)
        return 1.0 - worked / whole if whole else 0.0

    def bars(self, rank: int) -> list[Bar]:
        """Return the bars of a rank in the order of time, without messages."""
        spans = sorted(
            (span for span in self.timeline[rank] if span.action.op.is_compute),
            key=lambda span: span.start,
        )
        slack = 1e-6 * self.makespan  # clocks and sums of times are not exact
        lanes: list[int | None] = []
        for index, span in enumerate(spans):
            together = index > 0 and span.start < spans[index - 1].end - slack
            if together and lanes[-1] is None:
                lanes[-1] = 0
            lanes.append(1 - (lanes[-1] or 0) if together else None)
        return [
            Bar(span.action, span.start, span.end, lane)
            for span, lane in zip(spans, lanes, strict=True)
        ]


def draw_text(panel: Panel, *, width: int = 120) -> str:
    """Draw a run in characters, one line for each rank and the time from left to right.

    Args:
        panel: The run.
        width: Largest number of characters in a line. A short run uses fewer, enough for the name
            of each action; a long run loses names.

    Returns:
        The lines, followed by a line with the makespan and the idle share. `F3b` is the forward of
        micro-batch 3 in the rank's second stage; an overlapped pair is shown as its forward and
        `&`.
    """
    require_kind(panel, Panel)
    if require_positive("width", width, 10_000) < 20:
        raise ValueError(f"width is {width}: expected at least 20 characters")
    ranks = range(len(panel.timeline))
    bars = [panel.bars(rank) for rank in ranks]
    name = {
        bar: panel.schedule.notation(rank, bar.action) + ("&" if bar.lane == 0 else "")
        for rank in ranks
        for bar in bars[rank]
    }
    head = len(f"rank {len(ranks) - 1} ")
    longest = max(
        ((len(text) + 1) / max(bar.end - bar.start, 1e-12) for bar, text in name.items()), default=1
    )
    scale = min(longest, (width - head - 2) / (panel.makespan or 1.0))
    lines = []
    for rank in ranks:
        cells = [" "] * (round(panel.makespan * scale) + 1)
        for bar in bars[rank]:
            if bar.lane == 1:
                continue
            start, end = round(bar.start * scale), round(bar.end * scale)
            text = name[bar] if len(name[bar]) <= end - start else bar.action.op.value
            cells[start:end] = text[: end - start].ljust(end - start, "-")
        lines.append(f"{f'rank {rank}':{head}}|{''.join(cells).rstrip()}")
    lines.append(f"makespan {panel.makespan:g} ({panel.unit}), {panel.idle():.1%} of it idle")
    return "\n".join([panel.title, *lines])
