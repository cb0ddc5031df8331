"""Type checks and JSON for frozen dataclasses, with errors that name the path of the value."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")


def check_fields(config: Any) -> None:
    """Raise TypeError or ValueError when a field of `config` is not of its declared type."""
    hints = typing.get_type_hints(type(config))
    for field in fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if not _matches(value, hint):
            message = f"{type(config).__name__}.{field.name}={value!r}: expected {_spell(hint)}"
            raise ValueError(message) if _literals(hint) else TypeError(message)


def check_positive(config: Any, *names: str) -> None:
    """Raise ValueError when a named field is not a finite number above zero."""
    for name in names:
        value = getattr(config, name)
        if not 0 < value < float("inf"):
            raise ValueError(f"{type(config).__name__}.{name}={value!r}: expected more than 0")


def check_probability(config: Any, *names: str) -> None:
    """Raise ValueError when a named field is not in [0, 1)."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ValueError(
                f"{type(config).__name__}.{name}={value!r}: expected at least 0 and less than 1"
            )


def divisors(value: int) -> list[int]:
    """Every divisor of `value`, ascending."""
    low = [d for d in range(1, int(value**0.5) + 1) if value % d == 0]
    return sorted({*low, *(value // d for d in low)})


def nearest(value: int, allowed: Iterable[int], name: str) -> str:
    """Say which allowed values lie around `value`."""
    ordered = sorted(allowed)
    around = [v for v in ordered if v < value][-1:] + [v for v in ordered if v > value][:1]
    return f"Nearest {name} that does: {' or '.join(map(str, around))}."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the closest known name, or list them all."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."


def to_dict(config: Any) -> dict[str, Any]:
    """Nested dataclasses as dicts; a member of a list of kinds carries a `type` key."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {"type": type(value).__name__.removesuffix("Config").lower(), **to_dict(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def from_dict(cls: type[T], data: Any, path: str = "") -> T:
    """Build dataclass `cls` from `to_dict`'s output, checking keys, types and ranges."""
    if not isinstance(data, Mapping):
        message = f"{path or cls.__name__}: expected a mapping, got {data!r}"
        raise ValueError(message)  # noqa: TRY004 - a fault in the data, like the others here
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    dot = f"{path}." if path else ""
    kind = cls.__name__.removesuffix("Config").lower()
    if data.get("type", kind) != kind:
        raise ValueError(f"{dot}type: {data['type']!r} is not known here. Known: {kind}.")
    given = {key: value for key, value in data.items() if key != "type"}
    for key in given:
        if key not in known:
            raise ValueError(f"{dot}{key}: unknown key. {did_you_mean(str(key), known)}")
    for name, field in known.items():
        if name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{dot}{name}: missing (expected {_spell(hints[name])})")
    values = {k: _build(hints[k], v, f"{dot}{k}") for k, v in given.items()}
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}" if path else str(error)) from error


def _build(hint: Any, value: Any, path: str) -> Any:
    options = _options(hint)
    if value is None and type(None) in options:
        return None
    for option in options:
        if is_dataclass(option):
            return from_dict(typing.cast(type, option), value, path)
        if typing.get_origin(option) is tuple:
            if not isinstance(value, list | tuple):
                raise ValueError(f"{path}: expected a list, got {value!r}")
            item = typing.get_args(option)[0]
            return tuple(_build(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    return value


def _options(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _literals(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def _matches(value: Any, hint: Any) -> bool:
    for option in _options(hint):
        if typing.get_origin(option) is Literal:
            ok = isinstance(value, str) and value in typing.get_args(option)
        elif typing.get_origin(option) is tuple:
            item = typing.get_args(option)[0]
            ok = isinstance(value, tuple) and all(isinstance(v, item) for v in value)
        elif option is float:
            ok = isinstance(value, int | float) and not isinstance(value, bool)
        elif option is int:
            ok = isinstance(value, int) and not isinstance(value, bool)
        else:
            ok = isinstance(value, option)
        if ok:
            return True
    return False


def _spell(hint: Any) -> str:
    if choices := _literals(hint):
        return "one of " + ", ".join(map(repr, choices))
    if typing.get_origin(hint) is tuple:
        return f"a list of {typing.get_args(hint)[0].__name__}"
    names = ["null" if o is type(None) else getattr(o, "__name__", str(o)) for o in _options(hint)]
    return " or ".join(names)
