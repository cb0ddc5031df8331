"""The rotary embedding in config.json, in its old and its new form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from mt_files import Checks, build, did_you_mean, shorten, to_plain
from mt_model import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)

_ORIGINAL = "original_max_position_embeddings"
_KINDS: Mapping[str, type[RopeScaling] | None] = MappingProxyType(
    {
        "default": None,
        "linear": LinearScaling,
        "dynamic": DynamicScaling,
        "llama3": Llama3Scaling,
        "yarn": YarnScaling,
        "longrope": LongropeScaling,
    }
)
_OLD_NAMES: Mapping[str, str] = MappingProxyType({"su": "longrope"})


class HasRope(Protocol):
    """Fields of a config.json with a rotary embedding."""

    @property
    def max_position_embeddings(self) -> int:
        """Length of the longest sequence."""
        ...

    @property
    def rope_theta(self) -> float | None:
        """Base of the angles, as transformers wrote it before version 5."""
        ...

    @property
    def rope_scaling(self) -> Mapping[str, Any] | None:
        """Other parameters, as transformers wrote them before version 5."""
        ...

    @property
    def rope_parameters(self) -> Mapping[str, Any] | None:
        """All parameters, as transformers 5 writes them."""
        ...


def check_rope(checks: Checks, given: HasRope, read: Callable[[], object]) -> None:
    """Add the problem that `read` raises, under the field with the rotary embedding."""
    try:
        read()
    except ValueError as error:
        name = "rope_scaling" if given.rope_scaling else "rope_parameters"
        checks.add(name, str(error).replace("\n", "; "))


def read_rope(given: HasRope, *, partial: bool = False) -> RopeConfig:
    """Return the rotary embedding that a config.json describes.

    Args:
        given: Fields of the config.json.
        partial: Whether the family rotates a part of the channels, `partial_rotary_factor`.

    Raises:
        ValueError: A kind or a field is unknown, or a value is refused.
    """
    found = dict(given.rope_scaling or given.rope_parameters or {})
    old = found.pop("type", None)
    named = found.pop("rope_type", None) or old or "default"
    kind = _OLD_NAMES.get(named, named)
    theta = found.pop("rope_theta", None) or given.rope_theta or 10000.0
    fraction = found.pop("partial_rotary_factor", None) if partial else None
    if kind not in _KINDS:
        raise ValueError(
            f"the rope_type {shorten(kind)} is not known. {did_you_mean(kind, _KINDS)}"
        )
    values: dict[str, Any] = {"theta": theta, "fraction": 1.0 if fraction is None else fraction}
    scaling = _KINDS[kind]
    if scaling is None:
        if found:
            raise ValueError(f"{shorten(found)} is not known beside rope_type and rope_theta")
        return build(RopeConfig, values)
    return build(RopeConfig, {**values, "scaling": _scaling(kind, found, given)})


def write_rope(rope: RopeConfig | None) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling` for a rotary embedding.

    The caller reads them again and reports omissions.
    """
    if rope is None:
        return {"rope_theta": None, "rope_scaling": None}
    if rope.scaling is None:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    values = {name: value for name, value in to_plain(rope.scaling).items() if value is not None}
    values.pop("type", None)
    original = values.pop("original_length", None)
    kind = next(name for name, cls in _KINDS.items() if cls is type(rope.scaling))
    if original is not None and kind != "dynamic":
        values[_ORIGINAL] = original
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": kind, **values}}


def _scaling(kind: str, found: Mapping[str, Any], given: HasRope) -> dict[str, Any]:
    """Return the plain values of a scaling."""
    values = {name: value for name, value in found.items() if value is not None}
    values.pop("finetuned", None)  # of NousResearch's models: how they were made
    longest = given.max_position_embeddings
    if kind == "dynamic":
        values.pop(_ORIGINAL, None)  # as in transformers, nothing reads it
        values["original_length"] = longest
    elif kind != "linear":
        # If both forms are present, this field wins, as in transformers.
        beside = getattr(given, _ORIGINAL, None)
        original = values.pop(_ORIGINAL, None)
        values["original_length"] = beside or original or longest
    if kind in ("yarn", "longrope") and "factor" not in values:
        values["factor"] = longest / values["original_length"]
    return {"type": kind, **values}
