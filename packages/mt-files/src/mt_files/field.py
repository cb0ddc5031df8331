"""Checks of the fields of a dataclass, and the messages for wrong values."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

MAX_INT = 10**18 - 1  # fits 64 bits, and every sum of two
_MAX_LISTED = 20
_MAX_SHOWN = 80
_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}


class FieldError(ValueError):
    """One or more fields of a dataclass have wrong values.

    Attributes:
        errors: The description of each problem by the name of its field; a name may be dotted.
    """

    def __init__(self, errors: Mapping[str, str], owner: str = "") -> None:
        self.errors, self._owner = dict(errors), owner
        prefix = f"{owner}." if owner else ""
        super().__init__("; ".join(f"{prefix}{name}: {text}" for name, text in errors.items()))

    def __reduce__(self) -> tuple[type[FieldError], tuple[dict[str, str], str]]:
        return type(self), (self.errors, self._owner)

    @property
    def field(self) -> str:
        """Name of the first wrong field."""
        return next(iter(self.errors), "")


class Checks:
    """Collect the problems of a dataclass's fields, and raise them together.

    Use it in `__post_init__`. It first checks every field against its annotation; a field with a
    problem is not checked further.

    Args:
        value: The dataclass.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self.errors: dict[str, str] = {}
        for name, hint in hints_of(type(value)).items():
            found = getattr(value, name)
            if not matches(found, hint):
                self.errors[name] = unexpected(hint, found)

    def add(self, name: str, text: str) -> None:
        """Record a problem, unless the field already has one."""
        self.errors.setdefault(name, text)

    def at_least(self, minimum: float, *names: str) -> None:
        """Refuse values below a minimum."""
        for name, value in self._given(names):
            if value < minimum:
                self.add(name, f"{shorten(value)} is too small; use {minimum} or more")

    def at_most(self, maximum: float, *names: str) -> None:
        """Refuse values above a maximum."""
        for name, value in self._given(names):
            if value > maximum:
                self.add(name, f"{shorten(value)} is too large; use {maximum} or less")

    def above(self, minimum: float, *names: str) -> None:
        """Refuse values that are not greater than a minimum."""
        for name, value in self._given(names):
            if value <= minimum:
                self.add(name, f"{shorten(value)} must be greater than {minimum}")

    def fraction(self, *names: str) -> None:
        """Refuse values outside of [0, 1)."""
        for name, value in self._given(names):
            if not 0 <= value < 1:
                self.add(name, f"{shorten(value)} must be at least 0 and below 1")

    def done(self) -> None:
        """Raise `FieldError` if there are any problems."""
        if self.errors:
            raise FieldError(self.errors, type(self._value).__name__)

    def _given(self, names: Iterable[str]) -> list[tuple[str, Any]]:
        values = [(name, getattr(self._value, name)) for name in names if name not in self.errors]
        return [(name, value) for name, value in values if value is not None]


@functools.lru_cache(maxsize=512)
def hints_of(cls: type) -> Mapping[str, Any]:
    """Return the annotations of the fields that a dataclass's constructor takes."""
    hints = typing.get_type_hints(cls)
    names = [item.name for item in dataclasses.fields(cls) if item.init]
    return types.MappingProxyType({name: hints[name] for name in names})


def options_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the one type."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)


def matches(value: object, hint: Any) -> bool:
    """Return whether a value fits an annotation; a bool is no int, and a float must be finite."""
    return any(_matches(value, option) for option in options_of(hint))


def _matches(value: object, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is None:
        return hint is Any or value is None
    if origin is Literal:
        return any(value == item and type(value) is type(item) for item in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if arguments[-1] is Ellipsis:
            return all(matches(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(matches, value, arguments))
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            matches(key, arguments[0]) and matches(item, arguments[1])
            for key, item in value.items()
        )
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INT
    if hint is float:
        return (isinstance(value, float) and math.isfinite(value)) or matches(value, int)
    return isinstance(value, origin or hint)


def unexpected(hint: Any, value: object) -> str:
    """Return the message for a value that does not fit its field."""
    if isinstance(value, list) and matches(tuple(value), hint):
        return f"found a list; give a tuple, {shorten(tuple(value))}"
    literals = [o for o in options_of(hint) if typing.get_origin(o) is Literal]
    if not literals or not isinstance(value, str):
        return f"expected {describe(hint)}, found {shorten(value)}"
    allowed = [str(item) for option in literals for item in typing.get_args(option)]
    others = [o for o in options_of(hint) if o not in (*literals, type(None))]
    known = ", ".join(allowed) + "".join(f" or {describe(option)}" for option in others)
    return f"{shorten(value)} is not one of {known}. {did_you_mean(value, allowed)}"


def describe(hint: Any) -> str:
    """Describe the type of a field in words."""
    options = options_of(hint)
    if len(options) > 1:
        return " or ".join(dict.fromkeys(describe(option) for option in options))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(item) for item in arguments)
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f" of {len(arguments)}"
        return f"a list{count}, each {describe(arguments[0])}"
    if dataclasses.is_dataclass(hint) or (origin is not None and issubclass(origin, Mapping)):
        return "a mapping"
    return _NAMES.get(hint) or getattr(hint, "__name__", str(hint))


def did_you_mean(word: str, known: Iterable[object], section: str = "") -> str:
    """Suggest the nearest known name, or list them all."""
    names = [str(name) for name in known]
    import difflib  # only needed for a wrong word

    near = difflib.get_close_matches(word[:_MAX_SHOWN], names, n=1, cutoff=0.6)
    prefix = f"{section}." if section else ""
    return f"Did you mean {prefix}{near[0]}?" if near else "Known: " + ", ".join(names)


def shorten(value: object, length: int = _MAX_SHOWN) -> str:
    """Return a value of any size as a string of bounded length, for messages."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        cut = value[:length]
        return repr(cut) if cut == value else f"{cut!r}... ({len(value)} characters)"
    if isinstance(value, list | tuple | dict | set | frozenset):
        kind = "a mapping" if isinstance(value, dict) else "a list"
        parts = (*value, *value.values()) if isinstance(value, dict) else value
        if len(value) > 8 or not all(map(_is_plain, parts)):
            return f"{kind} of {len(value)}" if value else f"an empty {kind[2:]}"
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."


def _is_plain(value: object) -> bool:
    """Return whether a value is no collection, nor a number of thousands of digits."""
    return isinstance(value, str | float) or (isinstance(value, int) and abs(value) <= 10**30)


def listed(values: Iterable[object]) -> str:
    """Return values as a list for messages: the first ones, then a count."""
    known = list(values)
    names = ", ".join(map(shorten, known[:_MAX_LISTED]))
    more = len(known) - _MAX_LISTED
    return f"{names} and {more} more" if more > 0 else names or "none"


def divisors(number: int, limit: int = 1 << 40) -> list[int]:
    """Return the divisors of a number in order; none if it exceeds `limit`."""
    if not 0 < number <= limit:
        return []
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})
