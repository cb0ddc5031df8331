"""The one list of kinds of rows: ours, and those that files and installed packages add.

A new kind of mt-train adds its line here. A kind of somebody else is a subclass of `DataSection` in
a file of `plugins:`, or in a module that an installed package names under the entry points
`mt.datasets`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, cast

from mt_files import PlainText, SchemaError, build, kinds_of, to_plain

from mt_train.config.kinds.chat import ChatData
from mt_train.config.kinds.image_text import ImageTextData
from mt_train.config.kinds.masked import MaskedData
from mt_train.config.kinds.pairs import PairData
from mt_train.config.kinds.retro import RetroData
from mt_train.config.kinds.section import DataSection
from mt_train.config.kinds.spans import SpanData
from mt_train.config.kinds.text import TextData

GROUP = "mt.datasets"
KINDS: tuple[type[DataSection], ...] = (
    TextData,
    MaskedData,
    SpanData,
    ChatData,
    PairData,
    RetroData,
    ImageTextData,
)
# Keys of files from before `data.kind` existed, and their kinds.
_OBJECTIVES = {"clm": TextData.type_name, "mlm": MaskedData.type_name}


def known_kinds() -> dict[str, type[DataSection]]:
    """Return all kinds by the value of `data.kind`, ours first."""
    found = {kind.type_name: kind for kind in KINDS}
    return found | cast("dict[str, type[DataSection]]", kinds_of(DataSection))


@cache
def load_installed_kinds() -> None:
    """Import the modules that installed packages name under the entry points `mt.datasets`."""
    for point in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        point.load()


def with_kind(data: Any) -> Any:
    """Return a section `data` as written in a file, with `kind` in place of older keys.

    `objective: clm` and `mlm` are the kinds text and masked, and `spans` is the kind spans. Keys of
    other kinds are left out if they are null or have their default, since older versions write them
    into `config.yaml`.
    """
    if not isinstance(data, dict) or "kind" in data:
        return data
    given = {name: value for name, value in data.items() if name != "objective"}
    objective = data.get("objective")
    if not (_is_null(objective) or objective in _OBJECTIVES):
        return data
    if objective == "mlm":
        given["kind"] = MaskedData.type_name
    elif not _is_null(given.get("spans")):
        given["kind"] = SpanData.type_name
    elif "objective" not in data and "spans" not in data:
        return data
    else:
        given["kind"] = TextData.type_name
    of_kind = known_kinds()[given["kind"]].own_keys()
    usual = {"split": None, "order": "stable", "packing": "none"}
    for name in ("spans", "masking", *usual):
        default = _is_null(given.get(name)) or given.get(name) == usual.get(name, "")
        if name in given and default and (name not in of_kind or _is_null(given[name])):
            del given[name]
    return given


def saved_data(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section `data` of a checkpoint as this version would write it."""
    given = with_kind(dict(data))
    try:
        found = build(DataSection, given)
    except SchemaError:  # of a kind that is not known here; it is compared as it stands
        return given
    return {"kind": found.kind, **to_plain(found)}


def key_of_another_kind(key: str, kind: str) -> str | None:
    """Return the text for a key that the run's kind lacks and another kind has."""
    others = [name for name, each in known_kinds().items() if key in each.own_keys()]
    if not others or kind in others:
        return None
    text = f"is a key of data.kind {' and '.join(others)}, and this run's is {kind}"
    return f"{text}; leave it out, or set data.kind: {others[0]}"


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, PlainText) and value.is_null)
