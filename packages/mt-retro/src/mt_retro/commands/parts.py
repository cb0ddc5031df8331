"""The parts of a command's work: one of them, or all of them side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from mt_data import DataError, Part, Where, run_jobs
from mt_files import Progress

T = TypeVar("T")
Make = Callable[[Part | None, Progress], T]


@dataclass(frozen=True, kw_only=True)
class InParts:
    """The arguments of a command whose work has parts.

    Attributes:
        part: Make one of several equal parts, such as 3/16, on one of several machines; whoever
            makes the last one joins them.
        parts: Number of parts to make side by side, and to join.
        workers: Number of processes that make parts.
        on: Where parts are made: in processes, or on a Ray cluster that shares the file system.
        progress: Show progress even if standard error is not a terminal.
    """

    part: str | None = None
    parts: int | None = None
    workers: int = 1
    on: Where = "processes"
    progress: bool = False

    def made(self, make: Make[T], what: str) -> T:
        """Return what `make` returns for the wanted part, or for all.

        Args:
            make: The work on a part, or on all. It can be pickled, and its paths are absolute.
            what: The command.

        Raises:
            DataError: The arguments contradict each other, or a part fails.
        """
        if self.part is not None and self.parts is not None:
            raise DataError("--part makes one part of several, and --parts all of them; give one")
        if self.on != "processes" and self.parts is None:
            raise DataError("--on says where --parts are made; give their number")
        progress = Progress(shown=self.progress or None)
        part = None if self.part is None else Part.parse(self.part)
        try:
            if self.parts is not None:
                parts = [Part(number=n + 1, count=self.parts) for n in range(max(self.parts, 1))]
                jobs = [partial(_make, make, each) for each in parts]
                run = run_jobs(jobs, self.on, workers=self.workers, what=f"{what} --on ray")
                for done, _ in enumerate(run, 1):
                    progress.update("parts", done, self.parts, unit="parts")
            return make(part, progress)
        finally:
            progress.clear()


def _make(make: Make[object], part: Part) -> None:
    make(part, Progress(shown=False))
