"""Errors that users of the package can catch."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable
from types import ModuleType

from mt_files import UserError

_LONGEST = 2000
_QUOTED = 80
_LISTED = 20


class DataError(UserError, ValueError):
    """Data or arguments that do not fit together; the message says how to fix it."""

    def __init__(self, message: str) -> None:
        super().__init__(shorten(message, _LONGEST))


class DataFileError(DataError):
    """A file whose content is not what its format demands.

    Attributes:
        path: The file at fault.
        problem: What is wrong with it.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = shorten(problem, _LONGEST)

    def __reduce__(self) -> tuple[type[DataFileError], tuple[str, str]]:
        return type(self), (self.path, self.problem)


class MissingExtraError(ImportError):
    """An optional library is needed for what was asked."""


def require(module: str, extra: str, what: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise MissingExtraError(f"{what} needs: pip install 'mt-data[{extra}]'") from error


def at_least(minimum: int, **sizes: int) -> None:
    """Refuse sizes below a minimum, by name."""
    for name, size in sizes.items():
        if size < minimum:
            raise DataError(f"{name} is {size}; it must be at least {minimum}")


def shorten(text: str, length: int) -> str:
    """Cut the middle out of a text that is longer than `length`."""
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]} ...[{len(text) - 2 * half} characters]... {text[-half:]}"


def quote(value: object) -> str:
    """Return a value as it is shown in messages: its repr, bounded."""
    if isinstance(value, str | bytes):
        value = value if len(value) <= _LONGEST else value[:_LONGEST]
    return shorten(repr(value), _QUOTED)


def listed(values: Collection[object] | Iterable[object]) -> str:
    """Return values as a list in a message: the first ones quoted, then a count."""
    values = list(values)
    names = ", ".join(quote(value) for value in values[:_LISTED])
    more = len(values) - _LISTED
    return f"{names} and {more} more" if more > 0 else names or "none"


def is_library_error(error: BaseException) -> bool:
    """Tell whether an exception is a library's own, a panic of Rust code among them.

    A panic is a `BaseException` that is neither a request to stop nor one of Python's.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
