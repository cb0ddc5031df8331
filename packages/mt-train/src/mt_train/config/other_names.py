"""Names of our keys in other frameworks, for hints and for the page of keys."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

_FILE = Path(__file__).with_suffix(".yaml")
_UNKNOWN = "unknown key"


@cache
def other_names() -> dict[str, str]:
    """Return our key, or advice, for each name of another framework."""
    table = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {name: told for told, names in table.items() for name in names}


def hinted(path: str, text: str) -> str:
    """Return the text of a problem; for an unknown key with the key's name in mt-train."""
    name = path.rpartition(".")[2].replace("-", "_")
    told = other_names().get(name) if text.startswith(_UNKNOWN) else None
    return text if told is None else f"{_UNKNOWN}. Use {told}"
