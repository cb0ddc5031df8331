"""The `mt-pipeline` command: draw, print and check schedules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_schedule.checker import check
from mt_schedule.costs import Costs
from mt_schedule.gantt import Panel, draw_text
from mt_schedule.ir import Schedule
from mt_schedule.schedules import make_schedule
from mt_schedule.simulator import simulate
from mt_schedule.svg import draw_svg

USAGE_ERROR = 2


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """A schedule, by name or from a file.

    Attributes:
        schedule: A name such as 1f1b or zb-v, or a .json file that `Schedule.to_json` wrote.
        stages: Number of pipeline ranks.
        microbatches: Number of micro-batches.
        chunks: Stages on each rank, for interleaved and bfs.
        group: Micro-batches that visit a chunk before the next chunk, for interleaved.
        overlap: Overlap each forward with the backward after it, for 1f1b and interleaved.
    """

    schedule: str
    stages: int = 4
    microbatches: int = 8
    chunks: int | None = None
    group: int | None = None
    overlap: bool = False

    def made(self) -> Schedule:
        """Return the chosen schedule."""
        if self.schedule.endswith(".json"):
            return Schedule.from_json(Path(self.schedule).read_text(encoding="utf-8"))
        given = {"chunks": self.chunks, "group": self.group, "overlap": self.overlap or None}
        options = {name: value for name, value in given.items() if value is not None}
        return make_schedule(self.schedule, self.stages, self.microbatches, **options)


@dataclass(frozen=True, kw_only=True)
class Draw(_Chosen):
    """Simulate a schedule and draw it as a Gantt chart, or print its errors.

    Attributes:
        output: An .svg file to write, also -o. Without it, the drawing is printed in characters.
        forward: Time of a stage's forward.
        backward: Time of a stage's backward.
        weight: The part of the backward for the weights; half of it by default.
        latency: Time of a transfer between two ranks.
        pair_share: Time of an overlapped pair, as a share of the sum of its two times.
        width: Width in pixels, or in characters.
    """

    output: Path | None = None
    forward: float = 1.0
    backward: float = 2.0
    weight: float | None = None
    latency: float = 0.0
    pair_share: float = 1.0
    width: int | None = None

    def run(self) -> None:
        """Run the command."""
        schedule = self.made()
        _require_right(schedule)
        costs = Costs(
            forward=self.forward,
            backward=self.backward,
            weight=self.weight,
            latency=self.latency,
            pair_share=self.pair_share,
        )
        panel = Panel.of(schedule, simulate(schedule, costs=costs))
        if self.output is None:
            _say(draw_text(panel, width=self.width or 120))
            return
        self.output.write_text(draw_svg(panel, width=self.width or 960), encoding="utf-8")
        _say(f"{self.output}: makespan {panel.makespan:g}, {panel.idle():.1%} idle")


@dataclass(frozen=True, kw_only=True)
class Show(_Chosen):
    """Print a schedule in the papers' notation, its costs, and its errors.

    Attributes:
        json: Print JSON instead, which can be edited and read again.
    """

    json: bool = False

    def run(self) -> None:
        """Run the command."""
        schedule = self.made()
        _say(schedule.to_json() if self.json else str(schedule))
        _require_right(schedule)
        if not self.json:
            simulated = simulate(schedule)
            _say(
                f"right; makespan {simulated.makespan:g}, "
                f"peak activations {', '.join(map(str, simulated.peak_activations))}"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `mt-pipeline`; exits with 2 and one message on an error."""
    try:
        import tyro
    except ModuleNotFoundError:
        _say("mt-pipeline: this command needs: pip install tyro", stream=sys.stderr)
        raise SystemExit(USAGE_ERROR) from None
    arguments = sys.argv[1:] if arguments is None else arguments
    command = tyro.extras.subcommand_cli_from_dict(
        {"draw": Draw, "show": Show},
        prog="mt-pipeline",
        description=__doc__,
        args=["--output" if word == "-o" else word for word in arguments],
        config=(tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff),
    )
    try:
        command.run()
    except (ValueError, OSError) as error:
        _say(f"mt-pipeline: {_sentence(error)}", stream=sys.stderr)
        raise SystemExit(USAGE_ERROR) from None


def _require_right(schedule: Schedule) -> None:
    """Print the errors of a schedule, and exit with 1 if there are any."""
    violations = check(schedule)
    for violation in violations:
        _say(str(violation), stream=sys.stderr)
    if violations:
        raise SystemExit(1)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _say(text: str, *, stream: Any = None) -> None:
    (stream or sys.stdout).write(text + "\n")
