"""Tables of a Chrome trace: the share of each section and operator in a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from mt_files import FileError, SchemaError, build, read_json

_MAX_BYTES = 4 * 2**30
_SECTIONS = (
    *("step", "data", "forward", "backward"),
    *("messages", "gradients", "agreement", "optimizer"),
)
_HOST, _GPU = ("cpu_op", "user_annotation"), ("kernel", "gpu_memcpy", "gpu_memset")
_MOST_ROWS = 20
Rows: TypeAlias = list[tuple[str, int, float]]


@dataclass(frozen=True, kw_only=True)
class _Event:
    """One block of a trace; times are in microseconds."""

    name: str
    cat: str
    ts: int | float
    dur: int | float
    pid: int | str
    tid: int | str


def profile_tables(path: Path) -> str:
    """Return tables of a trace's step times: by section, by operator, and by kernel of a GPU.

    Times of sections and operators are the host's, without the sections or operators inside. A
    thread that works beside the step, such as one of gloo, adds to the operators.

    Raises:
        FileError: The file is no trace of `training.profile`.
    """
    events = list(_events(path))
    host = [event for event in events if event.cat in _HOST]
    gpu = [event for event in events if event.cat in _GPU]
    marks = list(_own_times(filter(_is_section, host)))
    steps = [event for event, _ in marks if event.name == "step"]
    if not steps:
        raise FileError(path, "no step in it; training.profile writes traces with steps")
    total, number = sum(step.dur for step in steps), len(steps)
    tables = {
        "section": _summed(("the rest" if e.name == "step" else e.name, t) for e, t in marks),
        "operator": _summed((e.name, t) for e, t in _own_times(host) if not _is_section(e)),
        "kernel": _summed((event.name, event.dur) for event in gpu),
    }
    title = f"{number} step{'s' * (number > 1)}, {total / number / 1e3:.3f} ms each"
    lines = [line for name, rows in tables.items() for line in _table(name, rows, number, total)]
    return "\n".join([title, *lines]) + "\n"


def _events(path: Path) -> Iterator[_Event]:
    """Yield the complete blocks of a trace."""
    content = read_json(path, limit=_MAX_BYTES)
    events = content.get("traceEvents") if isinstance(content, Mapping) else None
    if not isinstance(events, list):
        raise FileError(path, "no Chrome trace, which has a list traceEvents")
    names = ("name", "cat", "ts", "dur", "pid", "tid")
    for event in events:
        if not isinstance(event, Mapping) or event.get("ph") != "X":
            continue
        try:
            yield build(_Event, {name: event.get(name) for name in names})
        except SchemaError as error:
            raise FileError(path, f"no event of a Chrome trace: {error}") from error


def _is_section(event: _Event) -> bool:
    return event.name in _SECTIONS and event.cat == "user_annotation"


def _own_times(events: Iterable[_Event]) -> Iterator[tuple[_Event, float]]:
    """Yield the blocks, each with its time without the blocks inside it on the same thread."""
    open_blocks: dict[tuple[int | str, int | str], list[tuple[_Event, list[float]]]] = {}
    for event in sorted(events, key=lambda e: (e.ts, -e.dur)):
        within = open_blocks.setdefault((event.pid, event.tid), [])
        while within and within[-1][0].ts + within[-1][0].dur <= event.ts:
            block, inside = within.pop()
            yield block, block.dur - sum(inside)
        if within:
            within[-1][1].append(event.dur)
        within.append((event, []))
    for within in open_blocks.values():
        yield from ((block, block.dur - sum(inside)) for block, inside in within)


def _summed(pairs: Iterable[tuple[str, float]]) -> Rows:
    """Return the number and total time of each name, the longest first."""
    found: dict[str, tuple[int, float]] = {}
    for name, time in pairs:
        count, so_far = found.get(name, (0, 0.0))
        found[name] = count + 1, so_far + time
    return sorted(((n, *both) for n, both in found.items()), key=lambda row: -row[2])


def _table(name: str, rows: Rows, steps: int, total: float) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield f"{name:<48}{'calls':>8}{'ms':>12}{'share':>8}   of a step"
    for label, count, time in rows[:_MOST_ROWS]:
        numbers = f"{count / steps:>8.6g}{time / steps / 1e3:>12.3f}{time / total:>8.1%}"
        yield f"{label[:47]:<48}{numbers}"
    if len(rows) > _MOST_ROWS:
        yield f"and {len(rows) - _MOST_ROWS} more"
