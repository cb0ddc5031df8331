"""Configuration problems: what is wrong, where, and the way out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


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
    """All problems of a configuration, found in one pass."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class FieldError(ValueError):
    """What a section's `__post_init__` found, by field name (dotted when it joins sections)."""

    def __init__(self, errors: Mapping[str, str]) -> None:
        self.errors = dict(errors)
        super().__init__("; ".join(f"{name}: {text}" for name, text in self.errors.items()))
