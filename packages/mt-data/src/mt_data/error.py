"""Errors of the package, and parts of their messages."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable
from types import ModuleType

from mt_files import UserError

_LONGEST = 2000
_QUOTED = 80
_LISTED = 20


class DataError(UserError, ValueError):
    """Data or arguments are wrong; the message says how to fix it."""

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


class MissingExtraError(ImportError):
    """An optional library is missing."""


def require(module: str, what: str) -> ModuleType:
    """Import an optional dependency, or name the distribution that has it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        distribution = module.partition(".")[0]
        if error.name not in (module, distribution):
            raise
        raise MissingExtraError(f"{what} needs: pip install {distribution}") from error


def at_least(minimum: int, **sizes: int) -> None:
    """Refuse sizes below a minimum; the error has the name."""
    for name, size in sizes.items():
        if size < minimum:
            raise DataError(f"{name} is {size}; it must be at least {minimum}")


def shorten(text: str, length: int) -> str:
    """Cut the middle out of a text longer than `length`."""
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]} ...[{len(text) - 2 * half} characters]... {text[-half:]}"


def quote(value: object) -> str:
    """Return the repr of a value for messages, bounded in length."""
    if isinstance(value, str | bytes):
        value = value if len(value) <= _LONGEST else value[:_LONGEST]
    return shorten(repr(value), _QUOTED)


def listed(values: Collection[object] | Iterable[object]) -> str:
    """Return values as a list for messages: the first ones quoted, then a count."""
    values = list(values)
    names = ", ".join(quote(value) for value in values[:_LISTED])
    more = len(values) - _LISTED
    return f"{names} and {more} more" if more > 0 else names or "none"


def is_library_error(error: BaseException) -> bool:
    """Tell whether an exception comes from a library, including a panic of Rust code.

    A panic is a `BaseException`, but not a request to stop.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
