"""Conversion of plain values to frozen dataclasses and back.

Mappings, lists and scalars from YAML, JSON or a checkpoint's metadata become dataclasses. Types are
strict, all problems are found in one pass, and each problem names the path of its value.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar

from mt_files.field import (
    FieldError,
    describe,
    did_you_mean,
    hints_of,
    matches,
    options_of,
    shorten,
    unexpected,
)

T = TypeVar("T")
MAX_PROBLEMS = 20
_MAX_ITEMS = 100_000
_INT = re.compile(r"[-+]?\d{1,18}", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\d{1,60}\.?\d{0,60}|\.\d{1,60})([eE][-+]?\d{1,4})?", re.ASCII)


class PlainText(str):
    """A scalar that takes the type of its field: unquoted YAML text."""

    __slots__ = ()

    @property
    def is_null(self) -> bool:
        """Return whether it is YAML's null."""
        return self in ("", "~", "null")


class FieldProblem(NamedTuple):
    """A problem with one value.

    Attributes:
        path: Path of the value, such as `layers[3].mixer.num_heads`; empty for the whole.
        text: The problem, the allowed values and how to fix it.
        where: Place of the value, such as `file:line`; empty if unknown.
    """

    path: str
    text: str
    where: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.path, self.text) if part)


@dataclass(frozen=True, kw_only=True)
class Bound(Generic[T]):
    """The result of `bind`.

    Attributes:
        value: The dataclass, or None if there are problems.
        problems: The problems, at most `MAX_PROBLEMS`, in the order of the input.
        hidden: Number of further problems.
        parts: The valid nested dataclasses, by path.
    """

    value: T | None
    problems: tuple[FieldProblem, ...]
    hidden: int
    parts: Mapping[str, Any]


class SchemaError(ValueError):
    """A value does not fit its dataclass.

    Attributes:
        problems: The problems; the message shows `MAX_PROBLEMS` of them.
        hidden: Number of further problems that were not kept.
    """

    def __init__(self, problems: Sequence[FieldProblem], hidden: int = 0) -> None:
        self.problems, self.hidden = tuple(problems), hidden
        lines = [str(problem) for problem in problems[:MAX_PROBLEMS]]
        more = len(problems) - len(lines) + hidden
        super().__init__("\n".join(lines + ([f"and {more} more problems"] if more else [])))

    @classmethod
    def of(cls, where: str, text: str, path: str = "") -> Self:
        """Return the error of one problem."""
        return cls([FieldProblem(path, text, where)])

    def __reduce__(self) -> tuple[type[SchemaError], tuple[tuple[FieldProblem, ...], int]]:
        return type(self), (self.problems, self.hidden)


def build(cls: type[T], value: object, path: str = "") -> T:
    """Build a dataclass from plain values.

    Args:
        cls: The dataclass; its fields may be scalars, Literals, tuples, mappings, dataclasses and
            unions of them. If a field allows several dataclasses, or the kinds of a base class, the
            key `type` selects one, or the key that a base class names as its `kind_key`; a base
            class may have a `default_kind`. The key of a field is its name, without an underscore
            at the end (`from_`). A class may have `max_items`, the largest length of the list under
            a key, so that no longer one is built before it is refused.
        value: A mapping from YAML or JSON; dataclasses in it are kept. A class with
            `keeps_other_keys = "name"` collects unknown keys in that field, a mapping.
        path: Prefix of the paths in messages.

    Raises:
        SchemaError: There are problems; it lists all of them.
    """
    bound = bind(cls, value, path)
    if bound.value is None:
        raise SchemaError(bound.problems, bound.hidden)
    return bound.value


def bind(cls: type[T], value: object, path: str = "") -> Bound[T]:
    """Build a dataclass as `build` does, but return the problems instead of raising them."""
    binder = _Binder()
    result = binder.bind(cls, value, path)
    return Bound(
        value=None if binder.count else result,
        problems=tuple(binder.problems),
        hidden=binder.count - len(binder.problems),
        parts=binder.parts,
    )


def to_plain(value: Any) -> Any:
    """Turn each dataclass into a mapping and each tuple into a list; `build` restores the value."""
    return _plain(Any, value)


def _plain(hint: Any, value: Any) -> Any:
    """Return a field's plain value, with the key `type` if several kinds are possible."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kinds, hints = kinds_of(hint), hints_of(type(value))
        name = next((name for name, cls in kinds.items() if cls is type(value)), None)
        alone = len(kinds) == 1 and type(value) in options_of(hint)
        tag = {} if name is None or alone else {_kind_key(type(value)): name}
        plain = {_key(name): _plain(hints[name], getattr(value, name)) for name in hints}
        others = plain.pop(getattr(type(value), "keeps_other_keys", ""), {})
        return tag | plain | others
    if isinstance(value, tuple | list):
        inner = [typing.get_args(o) for o in options_of(hint) if typing.get_origin(o) is tuple]
        return [_plain(_item_hint(inner[0], i) if inner else Any, v) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        return {key: _plain(Any, item) for key, item in value.items()}
    if isinstance(value, PlainText):  # of a mapping that is bound later, by whoever knows its types
        found = (_scalar(kind, value) for kind in (bool, int, float))
        text = None if value.is_null else str(value)
        return next((each for each in found if each is not None), text)
    return value


def _item_hint(arguments: tuple[Any, ...], index: int) -> Any:
    return arguments[0] if arguments[-1] is Ellipsis else arguments[index]


def kinds_of(hint: Any) -> dict[str, type]:
    """Return the dataclasses that a field allows by name; a base class allows its kinds."""
    found: dict[str, type] = {}
    for option in options_of(hint):
        if dataclasses.is_dataclass(option):
            cls = typing.cast("type", option)
            below = _subclasses(cls)
            for kind in below or [cls]:
                found[kind_name(kind)] = kind
    return found


def _subclasses(cls: type) -> list[type]:
    found = []
    for child in cls.__subclasses__():
        if dataclasses.is_dataclass(child):
            below = _subclasses(child)
            is_kind = not below or "type_name" in vars(child)
            found += [child, *below] if is_kind else below
    return found


def kind_name(cls: type) -> str:
    """Return the value of the key `type` for a dataclass.

    It is the `type_name` of the class, or else its name without Config, in lower case.
    """
    return vars(cls).get("type_name") or cls.__name__.removesuffix("Config").lower()


def _kind_key(cls: Any) -> str:
    """Return the key that selects a kind of a base class."""
    return getattr(cls, "kind_key", "type")


def _key(name: str) -> str:
    """Return the key of a field in plain values: `from` for `from_`."""
    return name.removesuffix("_")


class _Binder:
    def __init__(self) -> None:
        self.problems: list[FieldProblem] = []
        self.count = 0
        self.parts: dict[str, Any] = {}

    def add(self, path: str, text: str) -> None:
        self.count += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(FieldProblem(path, text))

    def bind(self, hint: Any, value: object, path: str) -> Any:
        options = options_of(hint)
        if value is None or (isinstance(value, PlainText) and value.is_null):
            if type(None) in options or hint is Any:
                return None
            if dataclasses.is_dataclass(hint):
                value = {}  # a section without entries
        if hint is Any or _is_built(options, value):
            return value
        for option in options:
            origin = typing.get_origin(option)
            if isinstance(value, Mapping):
                if dataclasses.is_dataclass(option):
                    usual = getattr(option, "default_kind", None)
                    key = _kind_key(option)
                    return self._kind(kinds_of(hint), key, usual, value, path)
                if isinstance(origin, type) and issubclass(origin, Mapping):
                    return self._mapping(typing.get_args(option)[1], value, path)
            elif isinstance(value, list | tuple) and origin is tuple:
                return self._tuple(option, value, path)
            elif isinstance(value, str | int | float):
                scalar = _scalar(option, value)
                if scalar is not None:
                    return scalar
        self.add(path, _mismatch(hint, value))
        return None

    def _kind(
        self,
        kinds: Mapping[str, type],
        key: str,
        usual: str | None,
        value: Mapping[Any, Any],
        path: str,
    ) -> Any:
        only = next(iter(kinds.values())) if len(kinds) == 1 else None
        if only is not None and (key not in value or key in hints_of(only)):
            return self._dataclass(only, value, path)
        kind = value.get(key, usual)
        inner = f"{path}.{key}" if path else key
        if kind is None:
            self.add(inner, f"missing; add `{key}:` with one of {', '.join(kinds)}")
            return None
        if not isinstance(kind, str) or kind not in kinds:
            more = (getattr(each, "kind_hint", "") for each in kinds.values())
            hint = " ".join(filter(None, [did_you_mean(str(kind), kinds), next(more, "")]))
            self.add(inner, f"{shorten(kind)} is not known here. {hint}")
            return None
        rest = {name: item for name, item in value.items() if name != key}
        return self._dataclass(kinds[kind], rest, path)

    def _dataclass(self, cls: type, given: Mapping[Any, Any], path: str) -> Any:
        hints, before = hints_of(cls), self.count
        prefix = f"{path}." if path else ""
        keeps = getattr(cls, "keeps_other_keys", None)
        names = {_key(name): name for name in hints if name != keeps}
        limits = getattr(cls, "max_items", {})
        values: dict[Any, Any] = {}
        rest = None if keeps is None else values.setdefault(keeps, {})
        listed = ""  # once for each mapping
        for key, child in given.items():
            if key in names:
                inner = f"{prefix}{key}"
                if not self._is_too_long(child, limits.get(key, _MAX_ITEMS), inner):
                    values[names[key]] = self.bind(hints[names[key]], child, inner)
            elif rest is not None:
                rest[str(key)] = child
            elif len(self.problems) < MAX_PROBLEMS:
                hint = did_you_mean(str(key), names, path)
                text = "unknown key" if hint == listed else f"unknown key. {hint}"
                listed = listed if "Did you mean" in hint else hint
                self.add(f"{prefix}{_short_key(key)}", text)
            else:
                self.count += 1  # a hint for each of very many keys takes long
        for item in dataclasses.fields(cls):
            optional, key = (item.default, item.default_factory), _key(item.name)
            if item.init and key not in given and set(optional) == {dataclasses.MISSING}:
                expected = describe(hints[item.name])
                self.add(f"{prefix}{key}", f"missing; add `{key}:` with {expected}")
        if self.count > before:
            return None
        try:
            result = cls(**values)
        except FieldError as error:
            for name, text in error.errors.items():
                self.add(f"{prefix}{_key(name)}", text)
            return None
        except (ValueError, TypeError) as error:
            self.add(path, str(error))
            return None
        self.parts[path] = result
        return result

    def _tuple(self, hint: Any, value: Sequence[Any], path: str) -> Any:
        arguments = typing.get_args(hint)
        length = None if arguments[-1] is Ellipsis else len(arguments)
        if length is not None and len(value) != length:
            self.add(path, f"expected a list of {length}, found {len(value)}")
            return None
        if self._is_too_long(value, _MAX_ITEMS, path):
            return None
        return tuple(
            self.bind(_item_hint(arguments, index), item, f"{path}[{index}]")
            for index, item in enumerate(value)
        )

    def _is_too_long(self, value: object, limit: int, path: str) -> bool:
        """Return whether a value is a list of too many items, each of which takes time to build."""
        if not isinstance(value, list | tuple) or len(value) <= limit:
            return False
        self.add(path, f"a list of {len(value)} is too long; use at most {limit}")
        return True

    def _mapping(self, hint: Any, value: Mapping[Any, Any], path: str) -> Any:
        for key in value:
            if not isinstance(key, str):
                self.add(path, f"the key {shorten(key)} is no text")
                return None
        prefix = f"{path}." if path else ""
        return {k: self.bind(hint, v, f"{prefix}{_short_key(k)}") for k, v in value.items()}


def _is_built(options: Sequence[Any], value: object) -> bool:
    """Return whether a value is a dataclass already, of a type that its field takes."""
    kinds = tuple(option for option in options if isinstance(option, type))
    return dataclasses.is_dataclass(value) and isinstance(value, kinds)


def _scalar(hint: Any, value: str | float) -> Any:
    """Return a scalar as the type of its field, or None when it is none of it."""
    if typing.get_origin(hint) is Literal:
        as_text = isinstance(value, PlainText)
        choices = typing.get_args(hint)
        return next((c for c in choices if (str(c) if as_text else c) == value), None)
    if hint is str and isinstance(value, str):
        return str(value)
    if isinstance(value, PlainText):
        if hint is bool and value in ("true", "false"):
            return value == "true"
        if hint is int and _INT.fullmatch(value):
            return int(value)
        if hint is float and _FLOAT.fullmatch(value) and math.isfinite(float(value)):
            return float(value)
        return None
    return hint(value) if hint in (int, float, bool) and matches(value, hint) else None


def _mismatch(hint: Any, value: object) -> str:
    if isinstance(value, Mapping):
        return f"expected {describe(hint)}, found a mapping"
    if isinstance(value, list | tuple):
        return f"expected {describe(hint)}, found a list"
    if value is None or (isinstance(value, PlainText) and value.is_null):
        return f"expected {describe(hint)}, found nothing"
    text = unexpected(hint, value)
    unquoted = isinstance(value, str) and not isinstance(value, PlainText)
    if unquoted and any(
        _scalar(option, PlainText(value)) is not None for option in options_of(hint)
    ):
        return f"{text} (remove the quotes)"
    return text


def _short_key(key: object) -> str:
    text = str(key)
    return text if len(text) <= 60 else f"{text[:60]}..."
