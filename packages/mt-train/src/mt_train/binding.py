"""Bind located nodes to frozen dataclasses, collecting every problem in one pass."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from mt_train.document import Node
from mt_train.problem import FieldError, Problem

T = TypeVar("T")
_INT = re.compile(r"[-+]?\d{1,18}", re.ASCII)  # what 64 bits hold
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


class Binder:
    """Builds dataclasses from a document and remembers where each field came from.

    Attributes:
        problems: Everything found so far, in document order.
        places: Dotted field name to `file:line`.
        sections: The sections that are right in themselves, by name.
    """

    def __init__(self, root: Node) -> None:
        self.root = root
        self.problems: list[Problem] = []
        self.places: dict[str, str] = {"": root.where}
        self.sections: dict[str, Any] = {}

    def place(self, path: str) -> str:
        """Return where a field, or else its nearest section, is written."""
        while path and path not in self.places:
            path = path.rpartition(".")[0]
        return self.places[path]

    def problem(self, path: str, text: str) -> Problem:
        """Make the problem of a dotted field name."""
        return Problem(where=self.place(path), path=path, text=text)

    def add(self, path: str, text: str) -> None:
        """Record a problem at a dotted field name."""
        self.problems.append(self.problem(path, text))

    def section(self, cls: type[T], node: Node, path: str = "") -> T | None:
        """Build one dataclass; None when something in it is wrong (see `problems`)."""
        if node.is_null:
            node = Node(where=node.where, entries={})
        if node.entries is None:
            self.add(path, f"expected a mapping, found {node.kind}")
            return None
        hints = typing.get_type_hints(cls)
        fields = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
        before = len(self.problems)
        values: dict[str, Any] = {}
        for key, child in node.entries.items():
            dotted = f"{path}.{key}" if path else key
            self.places[dotted] = node.key_where.get(key, child.where)
            if key not in fields:
                self.add(dotted, "unknown key. " + did_you_mean(key, fields, path))
                continue
            values[key] = self._value(hints[key], child, dotted)
        for name, item in fields.items():
            missing = item.default is dataclasses.MISSING
            missing = missing and item.default_factory is dataclasses.MISSING
            if missing and name not in node.entries:
                dotted = f"{path}.{name}" if path else name
                self.add(dotted, f"missing; add `{name}:` with {describe(hints[name])}")
        if len(self.problems) > before:
            return None
        try:
            return cls(**values)
        except FieldError as errors:
            for name, text in errors.errors.items():
                self.add(f"{path}.{name}" if path else name, text)
            return None

    def _value(self, hint: Any, node: Node, path: str) -> Any:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            if node.is_null:
                return None
            choices = [item for item in arguments if item is not type(None)]
            lists = [item for item in choices if typing.get_origin(item) is tuple]
            choice = lists[0] if lists and node.items is not None else choices[0]
            return self._value(choice, node, path)
        if dataclasses.is_dataclass(hint):
            section = self.section(typing.cast(type, hint), node, path)
            if section is not None:
                self.sections[path] = section
            return section
        if origin is tuple:
            if node.items is None:
                self.add(path, f"expected a list, found {node.kind}")
                return None
            self.places |= {f"{path}[{i}]": item.where for i, item in enumerate(node.items)}
            return tuple(
                self._value(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(node.items)
            )
        if node.text is None:
            self.add(path, f"expected {describe(hint)}, found {node.kind}")
            return None
        if origin is Literal:
            if node.text in arguments:
                return node.text
            allowed = ", ".join(str(item) for item in arguments)
            self.add(
                path,
                f"{node.text!r} is not one of {allowed}. " + did_you_mean(node.text, arguments),
            )
            return None
        return self._scalar(hint, node, path)

    def _scalar(self, hint: type, node: Node, path: str) -> Any:
        text = node.text or ""
        if hint is str and not node.is_null:
            return text
        if not node.quoted:
            if hint is bool and text in ("true", "false"):
                return text == "true"
            if hint is int and _INT.fullmatch(text):
                return int(text)
            if hint is float and _FLOAT.fullmatch(text) and math.isfinite(float(text)):
                return float(text)
        hint_text = " (remove the quotes)" if node.quoted and hint is not str else ""
        found = "nothing" if node.is_null else repr(text)
        self.add(path, f"expected {describe(hint)}, found {found}{hint_text}")
        return None


def describe(hint: Any) -> str:
    """Name a field type in words for messages."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if a is type(None) else describe(a) for a in arguments)
    if origin is Literal:
        return "one of " + ", ".join(str(item) for item in arguments)
    if origin is tuple:
        return "a list"
    if dataclasses.is_dataclass(hint):
        return "a mapping"
    return _NAMES.get(hint, str(hint))


def did_you_mean(word: str, known: Iterable[str], section: str = "") -> str:
    """Suggest the nearest known name, or list them all."""
    names = [str(name) for name in known]
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    prefix = f"{section}." if section else ""
    if near:
        return f"Did you mean {prefix}{near[0]}?"
    return "Known: " + ", ".join(sorted(names))
