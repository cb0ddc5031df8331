"""SVG drawings of schedules' runs, for papers and pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mt_schedule.action import Op, require_kind, require_positive
from mt_schedule.gantt import Bar, Panel

# Name and colour of each operation, and the darker colour for a rank's second, third ... stage.
_LOOKS = {
    Op.F: ("forward (F)", "#8ab6e1", "#3f78b5"),
    Op.B: ("backward (B)", "#9bd08f", "#4a9140"),
    Op.I: ("input gradient (I)", "#86d3cb", "#2f8f86"),
    Op.W: ("weight gradient (W)", "#f7c77e", "#d08a1d"),
}
_LEFT, _ROW, _GAP, _TITLE, _AXIS, _LEGEND = 64.0, 22.0, 4.0, 26.0, 40.0, 26.0


def draw_svg(*panels: Panel, width: int = 960) -> str:
    """Draw runs one above the other, with one axis of time for all.

    The same function draws simulated and measured runs. Every action has a colour, the number of
    its micro-batch if there is room, and a tool tip; a rank's later stages are darker, and the two
    actions of an overlapped pair share a row.

    Args:
        panels: The runs, from top to bottom. Use the same unit in panels to compare.
        width: Width of the drawing in pixels.

    Returns:
        The text of an SVG file.

    Raises:
        ValueError: There is no panel, or `width` leaves no room.
    """
    if not panels:
        raise ValueError("there is nothing to draw: give at least one Panel")
    for panel in panels:
        require_kind(panel, Panel)
    if require_positive("width", width, 100_000) < 200:
        raise ValueError(f"width is {width}: expected at least 200 pixels")
    longest = max(panel.makespan for panel in panels) or 1.0
    scale = (width - _LEFT - 16) / longest
    body: list[str] = []
    top = 8.0
    for panel in panels:
        body += _panel(panel, top, scale, longest)
        top += _TITLE + len(panel.timeline) * (_ROW + _GAP) + _AXIS
    body += _legend(panels, top)
    height = round(top + _LEGEND)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" '
            'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *body,
            "</svg>\n",
        ]
    )


def _panel(panel: Panel, top: float, scale: float, longest: float) -> Iterator[str]:
    yield _text(_LEFT, top + 14, panel.title, size=14, weight="bold")
    top += _TITLE
    for rank in range(len(panel.timeline)):
        y = top + rank * (_ROW + _GAP)
        yield _text(_LEFT - 8, y + 15, f"rank {rank}", size=12, anchor="end")
        yield _box(_LEFT, y, panel.makespan * scale, _ROW, fill="#f1f1f1")
        stages = panel.schedule.stages_of(rank)
        for bar in panel.bars(rank):
            yield from _bar(bar, y, scale, is_first=bar.action.stage == stages[0])
    yield from _axis(panel, top + len(panel.timeline) * (_ROW + _GAP), scale, longest)


def _bar(bar: Bar, y: float, scale: float, *, is_first: bool) -> Iterator[str]:
    op, stage, microbatch = bar.action
    x, wide = _LEFT + bar.start * scale, (bar.end - bar.start) * scale
    high = _ROW if bar.lane is None else _ROW / 2
    y += high if bar.lane == 1 else 0.0
    about = f"{op.value}{microbatch} of stage {stage}: {bar.start:.4g} to {bar.end:.4g}"
    _, plain, dark = _LOOKS[op]
    fill = plain if is_first else dark
    yield _box(x, y, wide, high, fill=fill, about=about)
    size = 11 if bar.lane is None else 9
    label = str(microbatch)
    if wide >= 0.62 * size * len(label) + 2:
        colour = "#1a1a1a" if is_first else "white"
        middle = y + high / 2 + 0.36 * size
        yield _text(x + wide / 2, middle, label, size=size, anchor="middle", fill=colour)


def _axis(panel: Panel, y: float, scale: float, longest: float) -> Iterator[str]:
    end = _LEFT + longest * scale
    yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{end:.1f}" y2="{y:.1f}" stroke="#444"/>'
    step = _tick(longest)
    for number in range(math.floor(longest / step + 1e-9) + 1):
        x = _LEFT + number * step * scale
        yield f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{y + 4:.1f}" stroke="#444"/>'
        yield _text(x, y + 15, f"{number * step:g}", size=10, anchor="middle", fill="#444")
    note = f"{panel.unit}; makespan {panel.makespan:.4g}, {panel.idle():.1%} idle"
    yield _text(end, y + 29, note, size=11, anchor="end", fill="#444")


def _tick(longest: float) -> float:
    """Return a round step that divides the axis into about ten parts."""
    power = 10.0 ** math.floor(math.log10(longest / 10))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= longest / 10.001)


def _legend(panels: Sequence[Panel], top: float) -> Iterator[str]:
    seen = {
        (span.action.op, span.action.stage == panel.schedule.stages_of(rank)[0])
        for panel in panels
        for rank, spans in enumerate(panel.timeline)
        for span in spans
    }
    x = _LEFT
    for op, (name, plain, dark) in _LOOKS.items():
        shades = [shade for shade in (True, False) if (op, shade) in seen]
        for is_first in shades:
            yield _box(x, top, 14, 14, fill=plain if is_first else dark)
            x += 16
        if shades:
            yield _text(x + 4, top + 11, name, size=11)
            x += 6.2 * len(name) + 22
    if any(not is_first for _, is_first in seen):
        yield _text(x, top + 11, "dark: a rank's later stages", size=11, fill="#444")


def _box(x: float, y: float, wide: float, high: float, *, fill: str, about: str = "") -> str:
    stroke = ' stroke="white" stroke-width="0.8"' if about else ""
    head = (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{wide:.2f}" height="{high:.1f}" '
        f'fill="{fill}"{stroke}'
    )
    return f"{head}><title>{_escaped(about)}</title></rect>" if about else f"{head}/>"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int,
    anchor: str = "start",
    weight: str = "normal",
    fill: str = "#1a1a1a",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="{fill}">{_escaped(text)}</text>'
    )


def _escaped(text: str) -> str:
    import html  # with its entities, for drawings alone

    return html.escape(text)
