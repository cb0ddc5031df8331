"""A choice: the candidate that was taken, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from mt_kernels.candidate import Candidate

F = TypeVar("F")


@dataclass(frozen=True)
class Choice(Generic[F]):
    """The candidate that computes an operation, and why it was taken.

    Attributes:
        operation: Name of the operation.
        candidate: The candidate that was taken.
        reason: Why it was taken.
        others: Name and reason of each candidate that was passed over.

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
