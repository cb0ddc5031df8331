"""A decorator that marks an API as experimental: in a warning, its docstring and the docs."""

from __future__ import annotations

import functools
import inspect
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T", bound=Callable[..., Any])

_VERSION = re.compile(r"(0|[1-9]\d{0,5})\.(0|[1-9]\d{0,5})(?:\.(0|[1-9]\d{0,5}))?", re.ASCII)


class ExperimentalWarning(FutureWarning):
    """An experimental API was used: the next version may change or remove it."""


def experimental(*, since: str, remove_in: str) -> Callable[[T], T]:
    """Mark a function or a class whose API may still change.

    The first call, or the first instance, in a process warns with `ExperimentalWarning`. The
    docstring gets a note, and `docs/experimental.md` lists the name. From version `remove_in` of
    its package on, the workspace check fails until the mark is gone: by then the API is permanent
    or removed.

    A class is changed in place and remains the same class. Put the mark above all other decorators
    (`@dataclass`), but below `@staticmethod`, `@classmethod` and `@property`.

    Args:
        since: The version of the package that introduced it, such as `"0.2"`.
        remove_in: The version in which the mark ends.

    Raises:
        ValueError: A version is malformed, or the versions are out of order.
        TypeError: A version is not a string, or the marked object is not a function or a class.
    """
    if _version("since", since) >= _version("remove_in", remove_in):
        raise ValueError(
            f"remove_in={remove_in!r} is not after since={since!r}; give a later version"
        )

    def mark(marked: T) -> T:
        if not inspect.isclass(marked) and not inspect.isfunction(marked):
            raise TypeError(
                f"experimental marks functions and classes, got {type(marked).__name__}; put it "
                "below @staticmethod, @classmethod and @property"
            )
        name = f"{marked.__module__.partition('.')[0]}.{marked.__qualname__}"
        fate = f"it may change or go with any version, and is settled in {remove_in}"
        warn = _Once(f"{name} is experimental since {since}: {fate}")
        if inspect.isclass(marked):  # replace only __init__, so that it remains the same class
            result, cls = marked, cast("Any", marked)
            cls.__init__ = _warning_before(cls.__init__, warn)
        else:
            result = cast("T", _warning_before(marked, warn))
        result.__doc__ = _with_note(marked.__doc__, f"Experimental since {since}: {fate}.")
        return cast("T", result)

    return mark


def _warning_before(function: Callable[..., Any], warn: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def warned(*args: Any, **kwargs: Any) -> Any:
        warn()
        return function(*args, **kwargs)

    return warned


class _Once:
    """Warn the caller's caller, the first time only; the wrapper of the marked object keeps it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._told = False
        self._lock = threading.Lock()

    def __call__(self) -> None:
        if self._told:  # without the lock: it stays true once a warning was shown
            return
        with self._lock:
            first, self._told = not self._told, True
        if not first:
            return
        try:
            warnings.warn(self._text, ExperimentalWarning, stacklevel=3)
        except ExperimentalWarning:  # the user's filter makes it an error: raise it at every use
            self._told = False
            raise


def _with_note(text: str | None, note: str) -> str:
    """Insert the note below the summary of a docstring."""
    summary, _, rest = inspect.cleandoc(text or "").partition("\n\n")
    return "\n\n".join(part for part in (summary, note, rest) if part)


def _version(name: str, text: object) -> tuple[int, int, int]:
    if not isinstance(text, str):
        raise TypeError(f'{name} must be a string such as "0.2", got {text!r}')
    found = _VERSION.fullmatch(text)
    if found is None:
        raise ValueError(f'{name}={text[:40]!r} is not a version; write "X.Y" or "X.Y.Z"')
    major, minor, patch = found.groups(default="0")
    return int(major), int(minor), int(patch)
