"""The JSON values of a manifest: what it may hold, and how much."""

from __future__ import annotations

import math
from typing import Any

MAX_BYTES = 128 * 2**20
# A parsed value takes up to a hundred bytes, however short its text is.
_MAX_VALUES = 2**22
_MAX_DEPTH = 256


def check_metadata(metadata: Any) -> None:
    """Raise TypeError or ValueError unless JSON stores `metadata` without loss."""

    def walk(value: Any, where: str, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError(f"{where:.200}: nested deeper than {_MAX_DEPTH}, or within itself")
        if isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"{where}: key {key!r} is not a string")
                walk(item, f"{where}[{key!r}]", depth + 1)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                walk(item, f"{where}[{index}]", depth + 1)
        elif not (value is None or type(value) in (bool, int, float, str)):
            raise TypeError(f"{where}: a {type(value).__name__} is not a JSON value")
        elif type(value) is float and not math.isfinite(value):
            raise ValueError(f"{where}: {value} is not a JSON number; store it as a string")

    if not isinstance(metadata, dict):
        raise TypeError(f"metadata must be a dict, not {type(metadata).__name__}")
    walk(metadata, "metadata", 0)


def too_large(text: bytes) -> str | None:
    """Return the problem if a manifest is larger than a save writes, and a reader parses."""
    if len(text) > MAX_BYTES:
        return f"has {len(text)} bytes; at most {MAX_BYTES} are read of a manifest"
    values = sum(map(text.count, (b",", b"[", b"{")))
    if values > _MAX_VALUES:
        return f"has about {values} values; at most {_MAX_VALUES} are read of a manifest"
    return None
