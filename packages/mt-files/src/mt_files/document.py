"""A YAML file as plain values, with the place of each.

PyYAML scans; the traps of YAML 1.1 are closed here. Scalars stay text until a field's type says
what they are (`1e-4` is a float, `no` is a string, `010` is ten), duplicate keys, anchors, aliases
and tags are refused, and so is a file too large to have been written by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mt_files.reading import read_bytes
from mt_files.schema import FieldProblem, PlainText, SchemaError

try:
    import yaml
except ImportError as error:
    raise ModuleNotFoundError("reading YAML needs: pip install 'mt-files[yaml]'") from error

_MAX_BYTES = 1 << 20
_MAX_DEPTH = 20
_MAX_VALUES = 20_000
_MAX_WORD = 100


@dataclass(kw_only=True)
class Document:
    """Plain values: mappings, lists, quoted text, and `PlainText`.

    Attributes:
        root: The outermost value; None for an empty document.
        places: Where each dotted name is written, as `file:line`.
    """

    root: Any
    places: dict[str, str] = field(default_factory=dict)

    def place(self, path: str) -> str:
        """Return where a field, or else its nearest section, is written."""
        while path and path not in self.places:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.places[path]


def read_yaml(path: str | Path) -> Document:
    """Read a YAML file; needs `mt-files[yaml]`.

    Raises:
        FileError: The file can't be read.
        SchemaError: YAML that does not parse, duplicate keys, aliases, tags.
    """
    data = read_bytes(path, limit=_MAX_BYTES)
    try:
        source = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        text = "the file is not UTF-8 text; save it as UTF-8"
        raise SchemaError.of(f"{path}:{line}", text) from error
    return parse_yaml(source, str(path))


def parse_yaml(source: str, name: str, *, lines: bool = True) -> Document:
    """Parse YAML.

    Args:
        source: The text.
        name: Its name in places and messages.
        lines: Whether places have line numbers.

    Raises:
        SchemaError: As of `read_yaml`.
    """
    parser = _Parser(source, name, lines=lines)
    return Document(root=parser.parse(), places=parser.places)


class _Parser:
    """Build plain values from YAML's events in one pass.

    Attributes:
        places: Where each dotted name is written.
    """

    def __init__(self, source: str, name: str, *, lines: bool = True) -> None:
        self._source, self._name, self._lines = source, name, lines
        self._problems: list[FieldProblem] = []
        self._values = self._depth = 0
        self.places: dict[str, str] = {}

    def parse(self) -> Any:
        """Return the value of the document, or None when it is empty.

        Raises:
            SchemaError: The YAML is invalid; the message names the line.
        """
        try:
            value = self._document(yaml.parse(self._source, Loader=yaml.SafeLoader))
        except yaml.MarkedYAMLError as error:
            raise self._syntax(error) from error
        except SchemaError:
            raise
        except (yaml.YAMLError, ValueError, OverflowError) as error:  # a code point of 32 bits
            raise SchemaError.of(
                self._place(None), f"not valid YAML: {str(error)[:200]}"
            ) from error
        if self._problems:
            raise SchemaError(self._problems)
        return value

    def _document(self, events: Iterator[Any]) -> Any:
        value, documents = None, 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    text = "a second document starts here; a configuration is one document"
                    raise SchemaError.of(self._place(event.start_mark), text)
            elif isinstance(event, yaml.NodeEvent):
                self.places[""] = self._place(event.start_mark)
                value = self._value(event, events, "")
                empty = isinstance(value, PlainText) and value == ""
                value = None if empty else value
        return value

    def _place(self, mark: yaml.Mark | None) -> str:
        return f"{self._name}:{mark.line + 1 if mark else 1}" if self._lines else self._name

    def _value(self, event: Any, events: Iterator[Any], path: str) -> Any:
        self._refuse(event)
        if isinstance(event, yaml.ScalarEvent):
            return event.value if event.style else PlainText(event.value)
        self._depth += 1
        if isinstance(event, yaml.SequenceStartEvent):
            value: Any = self._list(events, path)
        else:
            value = self._mapping(events, path)
        self._depth -= 1
        return value

    def _list(self, events: Iterator[Any], path: str) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            inner = f"{path}[{len(items)}]"
            self.places[inner] = self._place(event.start_mark)
            items.append(self._value(event, events, inner))
        return items

    def _mapping(self, events: Iterator[Any], path: str) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            place = self._place(event.start_mark)
            key = self._value(event, events, path)
            word = key if isinstance(key, str) else "?"
            dotted = f"{path}.{word}" if path else str(word)
            first = self.places.get(dotted, "")
            value = self._value(next(events), events, dotted)
            if not isinstance(key, str) or len(key) > _MAX_WORD:
                text = f"keys must be plain words of at most {_MAX_WORD} characters"
                self._problems.append(FieldProblem(path, text, place))
            elif key in entries:
                line = first.rpartition(":")[2]
                text = f"this key is already set on line {line}; keep one of the two"
                self._problems.append(FieldProblem(dotted, text, place))
            else:
                entries[str(key)] = value
                self.places[dotted] = place
        return entries

    def _refuse(self, event: Any) -> None:
        self._values += 1
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if anchor:
            text = f"anchors and aliases (`{anchor[:40]}`) are not supported; write the value out"
        elif tag:
            text = (
                f"the tag {tag[:40]} is not supported; plain values take their type from the field"
            )
        elif self._depth > _MAX_DEPTH:
            text = f"nested deeper than {_MAX_DEPTH} levels"
        elif self._values > _MAX_VALUES:
            text = f"more than {_MAX_VALUES} keys and values, too many for a configuration"
        else:
            return
        raise SchemaError.of(self._place(event.start_mark), text)

    def _syntax(self, error: yaml.MarkedYAMLError) -> SchemaError:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)[:200]
        fix = "correct the YAML here"
        lines = self._source.splitlines()
        line = lines[mark.line] if mark and mark.line < len(lines) else ""
        if "\\t" in what or line.lstrip(" ").startswith("\t"):
            what, fix = "a tab is used for indentation", "YAML allows spaces only; use two spaces"
        return SchemaError.of(self._place(mark), f"{what}; {fix}")
