"""The key `training.profile`: the steps of a run to trace."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import Checks

_MOST_STEPS = 100  # a trace of one step of a small model has megabytes


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A trace of some steps.

    Attributes:
        steps: First and last step of the trace.
        ranks: Ranks that write a trace.
    """

    steps: tuple[int, int]
    ranks: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        checks = Checks(self)
        if not checks.errors:
            first, last = self.steps
            if not 1 <= first <= last:
                checks.add("steps", f"{[first, last]}: expected the first step and the last one")
            elif last - first >= _MOST_STEPS:
                checks.add("steps", f"{[first, last]}: use at most {_MOST_STEPS} steps")
            if not self.ranks or min(self.ranks) < 0 or len({*self.ranks}) < len(self.ranks):
                checks.add("ranks", f"{list(self.ranks)}: expected ranks from 0, each once")
        checks.done()
