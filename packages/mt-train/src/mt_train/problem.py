"""Configuration problems: what is wrong, where, and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mt_files import MAX_PROBLEMS


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing a user has to change.

    Attributes:
        where: `file:line`, or `command line` for an override.
        path: Dotted name of the field, empty when the whole file is meant.
        text: What is wrong, what is allowed and how to fix it.
    """

    where: str
    path: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.path, self.text) if part)


class ConfigError(Exception):
    """All problems of a configuration, found in one pass.

    Attributes:
        problems: What is wrong; the message shows `MAX_PROBLEMS` of them.
        hidden: How many more were found and not kept.
    """

    def __init__(self, problems: Iterable[Problem], hidden: int = 0) -> None:
        self.problems, self.hidden = tuple(problems), hidden
        shown = [str(problem) for problem in self.problems[:MAX_PROBLEMS]]
        more = len(self.problems) - len(shown) + hidden
        super().__init__("\n".join(shown + ([f"and {more} more problems"] if more else [])))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...], int]]:
        return type(self), (self.problems, self.hidden)
