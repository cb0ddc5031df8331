"""Make the table of the fields that transformers' configuration classes know.

    uv run python packages/mt-hf/tools/known_fields.py

writes `src/mt_hf/family/known_fields.json` from the installed transformers, one line for each
`model_type` that a family of mt-hf reads. A class knows its dataclass fields with their defaults,
the second names in its `attribute_map`, and the names that its code takes from `kwargs`; the code
of the model may read further attributes of the config. It is only parsed, and not imported.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import transformers
from mt_hf import known_families
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

TABLE = Path(__file__).parents[1] / "src/mt_hf/family/known_fields.json"
_ROOT = Path(transformers.__file__).parent
_SHARED = ("masking_utils.py", "cache_utils.py")  # code that every decoder's config passes through


def table() -> dict[str, Any]:
    """Return the table of the installed transformers."""
    kinds = sorted({kind for family in known_families().values() for kind in family.model_types})
    generation = GenerationConfig().to_dict() | GenerationConfig._get_default_generation_params()
    return {
        "transformers": transformers.__version__,
        "generation": sorted(generation),
        "base": _base(),
        "model_types": {kind: _of(kind) for kind in kinds if kind in CONFIG_MAPPING},
    }


def _base() -> dict[str, Any]:
    """Return what the base of all classes knows, and what code that all models share reads."""
    source = dedent(inspect.getsource(PreTrainedConfig.__post_init__))
    rope = (_ROOT / "modeling_rope_utils.py").read_text()
    taken = {*_taken(ast.parse(source)), *_taken(ast.parse(rope))}
    for name in _SHARED:
        taken |= {*_reads(ast.parse((_ROOT / name).read_text()))}
    taken -= _inherited()
    return {"fields": _defaults(PreTrainedConfig), "reads": sorted(taken)}


def _of(kind: str) -> dict[str, Any]:
    """Return what the class of a model_type knows, beyond the base of all classes."""
    cls = CONFIG_MAPPING[kind]
    fields = _defaults(cls)
    for name in _defaults(PreTrainedConfig):
        if fields[name] == _defaults(PreTrainedConfig)[name]:
            del fields[name]
    reads: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("transformers.models."):
            reads |= {*_taken(ast.parse(dedent(inspect.getsource(base))))}
    path = Path(inspect.getfile(cls))
    model = path.with_name(path.name.replace("configuration", "modeling"))
    reads |= {*_reads(ast.parse(model.read_text()))}
    reads -= {*fields, *_inherited()}
    return {
        "fields": fields,
        "names": dict(sorted(cls.attribute_map.items())),
        "reads": sorted(reads),
    }


def _inherited() -> set[str]:
    """Return the names of methods and fields of the base; properties may be in a config.json."""
    members = {name: getattr(PreTrainedConfig, name) for name in dir(PreTrainedConfig)}
    methods = {name for name, value in members.items() if not isinstance(value, property)}
    return methods | {*_defaults(PreTrainedConfig)}


def _defaults(cls: type) -> dict[str, Any]:
    found = {}
    for item in dataclasses.fields(cls):
        value = None if item.default is dataclasses.MISSING else item.default
        if item.default_factory is not dataclasses.MISSING:
            value = item.default_factory()
        found[item.name] = _plain(value)
    return dict(sorted(found.items()))


def _plain(value: Any) -> Any:
    """Return a default as JSON has it."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "Infinity" if value > 0 else "-Infinity"}
    return value


def _taken(tree: ast.AST) -> Iterator[str]:
    """Yield the names that code takes from its `kwargs`."""
    for node in ast.walk(tree):
        found: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            found = node.args[0] if _is_kwargs(node.func.value) else None
        elif isinstance(node, ast.Subscript) and _is_kwargs(node.value):
            found = node.slice
        elif isinstance(node, ast.Compare) and any(map(_is_kwargs, node.comparators)):
            found = node.left
        if isinstance(found, ast.Constant) and isinstance(found.value, str):
            yield found.value


def _reads(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes of a `config` that code reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            yield from _texts(node.args[1:2] if _is_config(node.args[0]) else ())


def _texts(nodes: Iterable[ast.expr]) -> Iterator[str]:
    yield from (x.value for x in nodes if isinstance(x, ast.Constant) and isinstance(x.value, str))


def _is_kwargs(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "kwargs"


def _is_config(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    return name == "config"


def text() -> str:
    """Return the table as the file has it, with a line for each model_type."""
    found = table()
    kinds = found.pop("model_types")
    lines = [f'  "{name}": {json.dumps(value)},' for name, value in found.items()]
    rows = [f'    "{kind}": {json.dumps(kinds[kind])}' for kind in kinds]
    return "\n".join(["{", *lines, '  "model_types": {', ",\n".join(rows), "  }", "}", ""])


if __name__ == "__main__":
    TABLE.write_text(text())
