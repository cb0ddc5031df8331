"""Reading of YAML files with rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mt_files import PlainText, read_text

from mt_quant.error import QuantizationError

_MAX_BYTES = 1 << 20
_MAX_DEPTH = 20


def read_document(path: str | Path) -> Any:
    """Read a YAML file: mappings, lists, quoted text and `PlainText`.

    Scalars stay text until a field's type says what they are. Duplicate keys, anchors and tags are
    refused.

    Raises:
        FileError: The file can't be read.
        QuantizationError: The YAML is invalid, or uses a refused feature; names the line.
    """
    import yaml  # only recipes in files need it

    text = read_text(path, limit=_MAX_BYTES)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise _error(path, event, "aliases (*name) are not read; write the value again")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error)
        raise QuantizationError(f"{path}{line}: no valid YAML: {problem}") from error
    except RecursionError:
        raise QuantizationError(f"{path}: is nested too deeply") from None
    return None if node is None else _value(node, path, 0)


def _value(node: Any, path: str | Path, depth: int) -> Any:
    """Return the value of a node; `id` names its kind, so yaml isn't imported here."""
    if depth > _MAX_DEPTH:
        raise _error(path, node, f"is nested deeper than {_MAX_DEPTH}")
    if node.id == "sequence":
        return [_value(item, path, depth + 1) for item in node.value]
    if node.id == "mapping":
        found: dict[str, Any] = {}
        for key, item in node.value:
            if key.id != "scalar" or key.value in found:
                raise _error(path, key, "a key must be text, and appear once")
            found[key.value] = _value(item, path, depth + 1)
        return found
    return PlainText(node.value) if node.style is None else str(node.value)


def _error(path: str | Path, node: Any, problem: str) -> QuantizationError:
    return QuantizationError(f"{path}:{node.start_mark.line + 1}: {problem}")
