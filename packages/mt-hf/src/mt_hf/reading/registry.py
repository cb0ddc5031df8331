"""The known families, from this package and from entry points."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from mt_files import did_you_mean, shorten
from mt_model import ModelConfig, StackConfig

from mt_hf.families import FAMILIES
from mt_hf.families.image.llava import llava
from mt_hf.family.error import ExchangeError
from mt_hf.family.family import Family

GROUP = "mt.models"


def known_families() -> dict[str, Family]:
    """Return the families by name.

    They are the families of `mt_hf.families`, and those that installed packages add through entry
    points of the group `mt.models`.

    Raises:
        ExchangeError: An entry point is no family, or two families have the same name.
    """
    found: dict[str, Family] = {}
    for origin, family in _all():
        if not isinstance(family, Family):
            raise ExchangeError(f"{origin} is {shorten(family)}, and not a mt_hf.Family")
        if family.fields.__subclasses__():
            raise ExchangeError(
                f"{origin}: its fields are the base of other fields; use a class below"
            )
        if family.name in found:
            raise ExchangeError(f"{origin}: there is a family {family.name!r} already; rename it")
        found[family.name] = family
    return found


def family_of(given: Mapping[str, Any], path: Path) -> Family:
    """Return the family of a config.json.

    Args:
        given: Content of the config.json.
        path: The file, for messages.

    Raises:
        ExchangeError: The architecture is unknown.
    """
    known = known_families()
    named = given.get("architectures")
    if isinstance(named, list) and named:
        by_class = {each: family for family in known.values() for each in family.architectures}
        for each in map(str, named):
            if each in by_class:
                return by_class[each]
            for family in known.values():
                if each in family.refused:
                    text = (
                        f"{each} of the family {family.name} is not built: {family.refused[each]}"
                    )
                    raise ExchangeError(f"{path}: {text}")
        hint = did_you_mean(str(named[0]), by_class)
        raise ExchangeError(
            f"{path}: the architecture {shorten(named[0])} is not known. {hint} Others are added "
            f"by packages with an entry point of {GROUP!r}"
        )
    by_type = {each: family for family in known.values() for each in family.model_types}
    kind = given.get("model_type")
    if isinstance(kind, str) and kind in by_type:
        return by_type[kind]
    hint = did_you_mean(str(kind), by_type)
    raise ExchangeError(f"{path}: the model_type {shorten(kind)} is not known. {hint}")


def find_family(config: StackConfig, named: str | None = None) -> tuple[Family, dict[str, Any]]:
    """Return the family of a model, and the fields of its config.json.

    Args:
        config: The model.
        named: Name of the family; None for the first with such a model and without a `like`.

    Raises:
        ExchangeError: No family has such a model; the message gives each family's reason.
    """
    known = known_families()
    if named is not None and named not in known:
        raise ExchangeError(f"family {shorten(named)} is not known. {did_you_mean(named, known)}")
    reasons = []
    own = (family for family in known.values() if not family.like)
    for family in own if named is None else [known[named]]:
        try:
            return family, family.fields_of(config)
        except ValueError as error:
            reasons.append(f"{family.name}: {error}")
    raise ExchangeError("the model is of no known family:\n  " + "\n  ".join(reasons))


def _all() -> Iterator[tuple[str, Any]]:
    for family in sorted((*FAMILIES, llava(_decoders)), key=lambda each: each.name):
        yield f"mt_hf.families: {family.name}", family
    for point in _points(tuple(sys.path)):
        yield f"the entry point {point.name!r} of {GROUP}", point.load()


@cache
def _points(path: tuple[str, ...]) -> list[EntryPoint]:
    """Return the entry points of the packages on a path, which takes milliseconds to find."""
    del path  # the key of the cache
    return sorted(entry_points(group=GROUP), key=lambda each: each.name)


def _decoders() -> list[Family]:
    """Return the families of language models without images."""
    found = known_families().values()
    return [each for each in found if each.builds is ModelConfig and each.name != "llava"]
