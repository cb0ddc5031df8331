"""A candidate, one implementation of an operation, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

F = TypeVar("F")


def serves(*_: Any) -> None:
    """Return None: a plain implementation has no obstacle and no drawback."""


@dataclass(frozen=True)
class Candidate(Generic[F]):
    """One implementation of an operation.

    Attributes:
        name: The name that asks for it, and that messages use.
        function: The implementation. An operation with a hand-written gradient may use a record of
            several functions; the registry's owner says which.
        obstacle: Returns why this candidate cannot compute some arguments, or None where it can.
            The registry's owner says which arguments it gets.
        drawback: Returns why another candidate is faster for these arguments, or None. `auto`
            passes over a candidate with a drawback; asking for it by name still works.
    """

    name: str
    function: F
    obstacle: Callable[..., str | None] = serves
    drawback: Callable[..., str | None] = serves


@dataclass(frozen=True)
class Choice(Generic[F]):
    """The chosen candidate of an operation, and the reason.

    Attributes:
        operation: Name of the operation.
        candidate: The chosen candidate.
        reason: Why it was chosen.
        others: Name and obstacle (or drawback) of each rejected candidate.

    Example:
        >>> print(Choice("norm", Candidate("plain", abs), "the first", (("fast", "odd width"),)))
        norm: plain (the first; not fast: odd width)
    """

    operation: str
    candidate: Candidate[F]
    reason: str
    others: tuple[tuple[str, str], ...] = ()

    @property
    def kernel(self) -> str:
        """The candidate's name."""
        return self.candidate.name

    def __str__(self) -> str:
        passed = "".join(f"; not {name}: {why}" for name, why in self.others)
        return f"{self.operation}: {self.kernel} ({self.reason}{passed})"
