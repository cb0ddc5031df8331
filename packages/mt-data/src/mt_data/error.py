"""Errors of the package, and parts of their messages."""

from __future__ import annotations

from typing import get_args

from mt_files import UserError
from mt_files import shorten as describe

_LONGEST = 2000


class DataError(UserError, ValueError):
    """Data or arguments are wrong; the message says how to fix the problem."""

    def __init__(self, message: str) -> None:
        super().__init__(shorten(message, _LONGEST))


class DataFileError(DataError):
    """The content of a file does not follow its format.

    Attributes:
        path: The file at fault.
        problem: Description of the problem.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = shorten(problem, _LONGEST)

    def __reduce__(self) -> tuple[type[DataFileError], tuple[str, str]]:
        return type(self), (self.path, self.problem)


def at_least(minimum: int, **sizes: int) -> None:
    """Refuse sizes below a minimum; the error has the argument's name."""
    for name, size in sizes.items():
        if size < minimum:
            raise DataError(f"{name} is {size}; it must be at least {minimum}")


def one_of(kind: object, **values: object) -> None:
    """Refuse values outside a `Literal`; the error has the argument's name."""
    for name, value in values.items():
        if value not in get_args(kind):
            choices = ", ".join(get_args(kind))
            raise DataError(f"{name} is {describe(value)}; choose one of {choices}")


def shorten(text: str, length: int) -> str:
    """Cut the middle out of a text longer than `length`."""
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]} ...[{len(text) - 2 * half} characters]... {text[-half:]}"
