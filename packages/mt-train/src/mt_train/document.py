"""A YAML file as located nodes: every value knows its file and line.

PyYAML parses; the traps of YAML 1.1 are closed here. Scalars stay text until a field's type says
what they are (`1e-4` is a float, `no` is a string, `010` is ten), and duplicate keys, anchors,
aliases and tags are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from mt_train.problem import ConfigError, Problem

_MAX_BYTES = 1 << 20
_MAX_DEPTH = 20
COMMAND_LINE = "command line"
Place = Callable[[yaml.Mark | None], str]


@dataclass(kw_only=True)
class Node:
    """A scalar (`text`), a list (`items`) or a mapping (`entries`) with the place it came from."""

    where: str
    text: str | None = None
    quoted: bool = False
    items: list[Node] | None = None
    entries: dict[str, Node] | None = None
    key_where: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Name the YAML kind for messages."""
        if self.entries is not None:
            return "a mapping"
        return "a list" if self.items is not None else f"{self.text!r}"

    @property
    def is_null(self) -> bool:
        """Tell whether this is YAML's null."""
        return self.text in ("", "~", "null") and not self.quoted


def read_document(path: Path) -> Node:
    """Read a YAML file whose root is a mapping.

    Raises:
        ConfigError: Missing or empty file, YAML that does not parse, duplicate keys, aliases.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        text = (
            f"cannot read the configuration: {error.strerror}. "
            "Check the path, or start from packages/mt-train/examples/tiny.yaml"
        )
        raise ConfigError([Problem(where=f"{path}:1", path="", text=text)]) from error
    if len(data) > _MAX_BYTES:
        text = f"{len(data)} bytes is too large for a configuration; at most {_MAX_BYTES}"
        raise ConfigError([Problem(where=f"{path}:1", path="", text=text)])
    try:
        source = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        text = "the file is not UTF-8 text; save it as UTF-8"
        raise ConfigError([Problem(where=f"{path}:{line}", path="", text=text)]) from error
    node = _parse(source, str(path))
    if node is None:
        text = "the file is empty; a run needs at least `model:`, `data:` and `training:`"
        raise ConfigError([Problem(where=f"{path}:1", path="", text=text)])
    if node.entries is None:
        text = f"expected a mapping of sections such as `model:`, found {node.kind}"
        raise ConfigError([Problem(where=node.where, path="", text=text)])
    return node


def apply_overrides(root: Node, overrides: list[str]) -> None:
    """Set `a.b=c` arguments in the document, creating sections as needed.

    Raises:
        ConfigError: An override without `=`, or one that goes through a scalar.
    """
    problems = []
    for override in overrides:
        path, equals, value = override.partition("=")
        if not equals or not path:
            text = f"{override!r} is not an override; write section.key=value"
            problems.append(Problem(where=COMMAND_LINE, path="", text=text))
            continue
        where = f"{COMMAND_LINE} ({override})"
        leaf = _parse(value, where, lines=False) or Node(where=where, text="")
        *parents, last = path.split(".")
        node = root
        for name in parents:
            node = _entry(node, name, where)
        entries = _entries(node)
        if entries is None:
            text = f"{'.'.join(parents)} is {node.kind} ({node.where}), which has no {last!r} in it"
            problems.append(Problem(where=where, path=path, text=text))
            continue
        entries[last] = leaf
        node.key_where[last] = where
    if problems:
        raise ConfigError(problems)


def _entries(node: Node) -> dict[str, Node] | None:
    """The entries of a mapping, or of an empty section; None for a scalar or a list."""
    if node.entries is None and node.items is None and node.is_null:
        node.entries, node.text = {}, None
    return node.entries


def _entry(node: Node, name: str, where: str) -> Node:
    """The section `name`, made if missing; a scalar on the way is returned as it is."""
    entries = _entries(node)
    if entries is None:
        return node
    node.key_where.setdefault(name, where)
    return entries.setdefault(name, Node(where=where, entries={}))


def _parse(source: str, name: str, *, lines: bool = True) -> Node | None:
    def place(mark: yaml.Mark | None) -> str:
        return f"{name}:{mark.line + 1 if mark else 1}" if lines else name

    try:
        _refuse_indirection(source, place)
        root = yaml.compose(source, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        fix = "correct the YAML here"
        if "\\t" in what or _line_of(source, mark).lstrip(" ").startswith("\t"):
            what, fix = "a tab is used for indentation", "YAML allows spaces only; use two spaces"
        problem = Problem(where=place(mark), path="", text=f"{what}; {fix}")
        raise ConfigError([problem]) from error
    except yaml.YAMLError as error:
        problem = Problem(where=place(None), path="", text=f"not valid YAML: {error}")
        raise ConfigError([problem]) from error
    if root is None:
        return None
    problems: list[Problem] = []
    node = _convert(root, place, problems, "")
    if problems:
        raise ConfigError(problems)
    return node


def _line_of(source: str, mark: yaml.Mark | None) -> str:
    lines = source.splitlines()
    return lines[mark.line] if mark and mark.line < len(lines) else ""


def _refuse_indirection(source: str, place: Place) -> None:
    depth = 0
    for event in yaml.parse(source, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        anchor = getattr(event, "anchor", None)
        tag = getattr(event, "tag", None)
        if anchor:
            text = f"anchors and aliases (`{anchor}`) are not supported; write the value out"
        elif tag:
            text = f"the tag {tag} is not supported; plain values take their type from the field"
        elif depth > _MAX_DEPTH:
            text = f"nested deeper than {_MAX_DEPTH} levels"
        else:
            continue
        raise ConfigError([Problem(where=place(event.start_mark), path="", text=text)])


def _convert(node: yaml.Node, place: Place, problems: list[Problem], path: str) -> Node:
    where = place(node.start_mark)
    if isinstance(node, yaml.ScalarNode):
        return Node(where=where, text=node.value, quoted=node.style in ("'", '"', "|", ">"))
    if isinstance(node, yaml.SequenceNode):
        items = [
            _convert(item, place, problems, f"{path}[{i}]") for i, item in enumerate(node.value)
        ]
        return Node(where=where, items=items)
    entries: dict[str, Node] = {}
    result = Node(where=where, entries=entries)
    for key_node, value_node in node.value:
        key_place = place(key_node.start_mark)
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(Problem(where=key_place, path=path, text="keys must be plain words"))
            continue
        key = key_node.value
        dotted = f"{path}.{key}" if path else key
        if key in entries:
            first = result.key_where[key].rpartition(":")[2]
            text = f"this key is already set on line {first}; keep one of the two"
            problems.append(Problem(where=key_place, path=dotted, text=text))
            continue
        entries[key] = _convert(value_node, place, problems, dotted)
        result.key_where[key] = key_place
    return result
