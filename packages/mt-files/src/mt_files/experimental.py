"""A gate for what may still change: it says so once, in its docstring and in the list of docs."""

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
    """Something experimental was used: it may change or go with the next version."""


def experimental(*, since: str, remove_in: str) -> Callable[[T], T]:
    """Mark a function or a class whose shape isn't settled.

    The first call, or the first instance, in a process warns with `ExperimentalWarning`. The
    docstring says what the thing is, and `docs/experimental.md` lists it. From version `remove_in`
    of its package on, the workspace check fails until the mark is gone: the thing has become
    permanent by then, or was removed.

    A class stays the class it is. The mark stands above all other decorators (`@dataclass`), but
    below `@staticmethod`, `@classmethod` and `@property`.

    Args:
        since: The package's version that brought it, such as `"0.2"`.
        remove_in: The version in which the mark ends.

    Raises:
        ValueError: A version is no version, or they are out of order.
        TypeError: A version is no text, or what is marked is no function and no class.
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
        if inspect.isclass(marked):  # it stays the class it is: only its __init__ is replaced
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
    """Warn the caller's caller, the first time only; kept by what was marked, not by a module."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._told = False
        self._lock = threading.Lock()

    def __call__(self) -> None:
        if self._told:  # without the lock: it never becomes false after a warning that was shown
            return
        with self._lock:
            first, self._told = not self._told, True
        if not first:
            return
        try:
            warnings.warn(self._text, ExperimentalWarning, stacklevel=3)
        except ExperimentalWarning:  # an error by the user's filter, which every use has to raise
            self._told = False
            raise


def _with_note(text: str | None, note: str) -> str:
    """Put the note below the summary of a docstring."""
    summary, _, rest = inspect.cleandoc(text or "").partition("\n\n")
    return "\n\n".join(part for part in (summary, note, rest) if part)


def _version(name: str, text: object) -> tuple[int, int, int]:
    if not isinstance(text, str):
        raise TypeError(f'{name} must be text such as "0.2", got {text!r}')
    found = _VERSION.fullmatch(text)
    if found is None:
        raise ValueError(f'{name}={text[:40]!r} is no version; write "X.Y" or "X.Y.Z"')
    major, minor, patch = found.groups(default="0")
    return int(major), int(minor), int(patch)
