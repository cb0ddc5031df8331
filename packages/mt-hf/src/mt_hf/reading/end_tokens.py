"""The tokens at which a folder's model ends a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_files import read_json, shorten

from mt_hf.family.error import ExchangeError
from mt_hf.reading.files import CONFIG, MAX_JSON, infinity, root_of

GENERATION = "generation_config.json"
_FIELD = "eos_token_id"
_INNER = ("decoder", "generator", "text_config")
_MAX_TOKENS = 1000


def read_end_tokens(folder: str | Path) -> frozenset[int]:
    """Return the ids at which transformers' `generate` ends: `eos_token_id` of a folder's files.

    The field is one id or a list. generation_config.json decides; if it has no such field,
    config.json does, or its part for text.

    Args:
        folder: A folder of Hugging Face transformers, or any path without these files.

    Returns:
        The ids; none if no file names one.

    Raises:
        ExchangeError: The field holds no ids.
        FileError: A file can't be read.
    """
    for name in (GENERATION, CONFIG):
        path = Path(folder) / name
        if not path.exists():
            continue
        root = root_of(path.parent)
        given = read_json(path, limit=MAX_JSON, within=root, constant=infinity)
        found = _named(given) if isinstance(given, Mapping) else None
        if found is not None:
            return _checked(found, path)
    return frozenset()


def _named(given: Mapping[str, Any]) -> object:
    """Return the field's value, from the whole or else from its first part with one."""
    inner = (given.get(part) for part in _INNER)
    parts = [given, *(part for part in inner if isinstance(part, Mapping))]
    return next((part[_FIELD] for part in parts if part.get(_FIELD) is not None), None)


def _checked(found: object, path: Path) -> frozenset[int]:
    given = found if isinstance(found, list) else [found]
    ids = [each for each in given if type(each) is int]
    if len(ids) < len(given) or len(ids) > _MAX_TOKENS:
        raise ExchangeError(
            f"{path}: {_FIELD} is {shorten(found)}, and must be a token's id or a list of at most "
            f"{_MAX_TOKENS} ids"
        )
    return frozenset(ids)
