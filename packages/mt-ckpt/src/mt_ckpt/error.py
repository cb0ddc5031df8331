"""Errors of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from mt_files import UserError

_LISTED = 50
_LONGEST = 20_000


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem of a checkpoint directory.

    Attributes:
        file: Path of the file, relative to the checkpoint directory.
        reason: The problem, in a sentence.
        tensor: Name of the array the file belongs to, or None for shared files.
    """

    file: str
    reason: str
    tensor: str | None = None

    def __str__(self) -> str:
        owner = f" (tensor {self.tensor!r})" if self.tensor is not None else ""
        return f"{self.file}{owner}: {self.reason}"


class CheckpointError(UserError):
    """A checkpoint cannot be saved, found or loaded as requested.

    Attributes:
        file: The file concerned, if any.
        tensor: The array concerned, if any.
    """

    def __init__(self, message: str, *, file: str | None = None, tensor: str | None = None) -> None:
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
        super().__init__(message)
        self.file = file
        self.tensor = tensor

    @classmethod
    def from_problems(cls, title: str, problems: Sequence[Problem], advice: str) -> Self:
        """Return one error for one or more problems.

        Args:
            title: First line, without its colon.
            problems: At least one; the error gets `file` and `tensor` of the first.
            advice: Last line, which says what to do.
        """
        shown = [str(problem) for problem in problems[:_LISTED]]
        if len(problems) > _LISTED:
            shown.append(f"... and {len(problems) - _LISTED} more")
        message = "\n  ".join([f"{title}:", *shown]) + f"\n{advice}"
        return cls(message, file=problems[0].file, tensor=problems[0].tensor)
