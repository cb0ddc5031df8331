"""The YAML file of a run with the changes of a command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mt_files import Document, FieldProblem, PlainText, SchemaError, parse_yaml, read_yaml, shorten

from mt_train.problem import ConfigError

COMMAND_LINE = "command line"
# What YAML would take for an alias, a tag or an error is a file name's star or mark in a list.
_BARE_MARK = re.compile(r"(?<=[\[,])(\s*)([*&!%@`][^,\[\]{}\"']*)")


def read_document(path: Path) -> Document:
    """Read a YAML file whose root is a mapping.

    Raises:
        ConfigError: Missing or empty file, YAML that does not parse, duplicate keys, aliases.
    """
    start = f"{path}:1"
    try:
        document = read_yaml(path)
    except SchemaError as error:
        raise ConfigError(error.problems) from error
    except (OSError, ValueError) as error:
        text = f"cannot read the configuration: {getattr(error, 'strerror', None) or error}. "
        text += "Check the path, or start from packages/mt-train/examples/tiny.yaml"
        raise ConfigError.of(start, text) from error
    if document.root is None:
        text = "the file is empty; a run needs at least `model:`, `data:` and `training:`"
        raise ConfigError.of(start, text)
    if not isinstance(document.root, dict):
        text = f"expected a mapping of sections such as `model:`, found {_kind(document.root)}"
        raise ConfigError.of(document.places[""], text)
    return document


def apply_overrides(document: Document, overrides: list[str]) -> None:
    """Set `a.b=c` arguments in the document, creating sections as needed.

    A value in quotes, brackets or braces is YAML; any other is text as it stands.

    Raises:
        ConfigError: An override without `=`, or one that goes through a scalar.
    """
    problems = []
    for override in overrides:
        path, equals, value = override.partition("=")
        if not equals or not path:
            text = f"{shorten(override)} is not an override; write section.key=value"
            problems.append(FieldProblem("", text, COMMAND_LINE))
            continue
        where = f"{COMMAND_LINE} ({override if len(override) <= 80 else override[:80] + '...'})"
        written, inside = _override_value(value.strip(), where)
        *parents, last = path.split(".")
        node: Any = document.root
        for depth, name in enumerate(parents):
            below = node.get(name)
            if below is None or (isinstance(below, PlainText) and below.is_null):
                below = node[name] = {}
                document.places.setdefault(".".join(parents[: depth + 1]), where)
            if not isinstance(below, dict):
                section = ".".join(parents[: depth + 1])
                text = f"{section} is {_kind(below)} ({document.place(section)}), which has no "
                text += f"{shorten(last)} in it"
                problems.append(FieldProblem(path, text, where))
                break
            node = below
        else:
            node[last] = written
            document.places |= {f"{path}{inner}": where for inner in inside}
    if problems:
        raise ConfigError(problems)


def _override_value(text: str, where: str) -> tuple[Any, list[str]]:
    """Return the value of an override, and the places in it below its own."""
    if not text.startswith(("[", "{", '"', "'")):
        return PlainText(text), [""]
    try:
        document = parse_yaml(text, where, lines=False)
        return document.root, list(document.places)
    except SchemaError as error:
        quoted = _BARE_MARK.sub(lambda found: f"{found[1]}'{found[2].rstrip()}'", text)
        if quoted == text:
            raise ConfigError(error.problems) from error
        return _override_value(quoted, where)


def _kind(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else shorten(value)
