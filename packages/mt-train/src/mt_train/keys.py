"""Every key of the YAML with its type, default and meaning, from the configuration's docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from mt_files import describe, did_you_mean, hints_of
from mt_model import FIELDS

from mt_train.config.document import COMMAND_LINE
from mt_train.config.kinds.registry import KINDS
from mt_train.config.kinds.section import DataSection
from mt_train.config.run_config import RunConfig
from mt_train.problem import ConfigError

_WIDTH = 100
_ENTRY = re.compile(r"^(\w+):(.*(?:\n .*)*)", re.MULTILINE)  # of `Attributes:`


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a section.

    Attributes:
        name: Dotted, such as `optimizer.lr`.
        type: Type of the value, in words.
        default: Default as written in YAML; empty for a required key.
        meaning: Meaning of the key, with its unit.
    """

    name: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the YAML.

    Attributes:
        name: Key of the section.
        text: Purpose of the section.
        keys: Keys in the section, in the order of the dataclass.
    """

    name: str
    text: str
    keys: tuple[Key, ...]


def sections() -> tuple[Section, ...]:
    """Return all sections, from the dataclasses."""
    hints, meanings = hints_of(RunConfig), _docstring(RunConfig)[1]
    kinds = {n: (hint, *get_args(hint)) for n, hint in hints.items()}  # a section may be null
    found = [
        _section(n, each) for n in kinds for each in kinds[n] if dataclasses.is_dataclass(each)
    ]
    plugins = Key(
        name="plugins",
        type=describe(hints["plugins"]),
        default="[]",
        meaning=meanings["plugins"],
    )
    text = "Kinds of layers of your own."
    return (*found, Section(name="plugins", text=text, keys=(plugins,)))


def explain(names: list[str]) -> str:
    """Explain the named sections or keys, for a terminal; all of them without names.

    Raises:
        ConfigError: A name is unknown.
    """
    lines: list[str] = []
    known = {section.name: list(section.keys) for section in sections()}
    known |= {key.name: [key] for section in sections() for key in section.keys}
    for name in names or [section.name for section in sections()]:
        if name not in known:
            text = f"{name!r} is no section and no key. {did_you_mean(name, known)[:300]}"
            raise ConfigError.of(COMMAND_LINE, text)
        for key in known[name]:
            default = f", default {key.default}" if key.default else ", needed"
            lines.append(f"{key.name}: {key.type}{default}")
            lines += textwrap.wrap(
                key.meaning, _WIDTH, initial_indent="    ", subsequent_indent="    "
            )
    return "\n".join(lines) + "\n"


def _section(name: str, cls: Any) -> Section:
    text, meanings = _docstring(cls)
    hints = hints_of(cls)
    keys = [
        Key(
            name=f"{name}.{item.name.removesuffix('_')}",
            type=describe(hints[item.name]),
            default=_default(item),
            meaning=meanings.get(item.name, ""),
        )
        for item in dataclasses.fields(cls)
    ]
    keys += _keys_of_kinds(name) if cls is DataSection else ()
    others = getattr(cls, "keeps_other_keys", None)
    if others is not None:
        keys = [key for key in keys if key.name != f"{name}.{others}"]
        known = {key.name for key in keys}
        keys += [key for key in _model_keys(name) if key.name not in known]
    return Section(name=name, text=text, keys=tuple(keys))


def _keys_of_kinds(section: str) -> Iterator[Key]:
    """Yield the key that chooses a kind of rows, and the keys of single kinds."""
    names = [kind.type_name for kind in KINDS]
    texts = [f"`{kind.type_name}`: {_docstring(kind)[0]}" for kind in KINDS]
    yield Key(
        name=f"{section}.{DataSection.kind_key}",
        type=f"one of {', '.join(names)}, or one of a plugin",
        default=DataSection.default_kind,
        meaning=f"Kind of the rows. {' '.join(texts)}",
    )
    found: dict[str, list[tuple[str, Key]]] = {}
    for kind in KINDS:
        own = {f"{section}.{name}" for name in kind.own_keys()}
        for key in _section(section, kind).keys:
            if key.name in own:
                found.setdefault(key.name, []).append((kind.type_name, key))
    for uses in found.values():
        meanings = (f"With `kind: {name}`: {key.meaning}" for name, key in uses)
        yield dataclasses.replace(uses[0][1], meaning=" ".join(meanings))


def _model_keys(section: str) -> Iterator[Key]:
    """Yield the fields of a model's configs, which are keys of the section too."""
    for name, (cls, field) in FIELDS.items():
        item = next(each for each in dataclasses.fields(cls) if each.name == field)
        default = "" if item.default is dataclasses.MISSING else _default(item)
        yield Key(
            name=f"{section}.{name}",
            type=describe(hints_of(cls)[field]),
            default=default or "null",
            meaning=_docstring(cls)[1][field],
        )


def _docstring(cls: type) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring, and the meanings of attributes, also from base classes."""
    text, meanings = "", dict[str, str]()
    for base in reversed(cls.__mro__):
        given = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        text, _, attributes = given.partition("\nAttributes:\n")
        entries = _ENTRY.findall(textwrap.dedent(attributes))
        meanings |= {name: " ".join(words.split()) for name, words in entries}
    return " ".join(text.split()), meanings


def _default(item: dataclasses.Field[Any]) -> str:
    if item.default_factory is not dataclasses.MISSING:
        return "{}"
    if item.default is dataclasses.MISSING:
        return ""
    if isinstance(item.default, tuple):
        return str(list(item.default))
    if isinstance(item.default, bool):
        return str(item.default).lower()
    return "null" if item.default is None else str(item.default)
