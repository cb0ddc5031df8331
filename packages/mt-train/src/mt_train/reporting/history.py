"""history.jsonl: the configurations of a run, each with the step from which it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_files import FileError, MissingFileError, parse_json, read_bytes, write_file

_MAX_BYTES = 64 * 2**20


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each differing field of two configurations."""
    old, new = _flat(before), _flat(now)
    names = [*new, *(name for name in old if name not in new)]
    return [
        f"{name}: {_shown(old.get(name))} -> {_shown(new.get(name))}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def record_part(path: Path, step: int, config: dict[str, Any], origin: str | None) -> None:
    """Record that the run trains with `config` after `step`.

    Each row has the configuration from its step to the next row's. Rows after `step` belong to a
    lost part of the run and are dropped. A part with an unchanged configuration adds no row.

    Args:
        path: The file, created if missing.
        step: Completed steps.
        config: The configuration, as JSON values.
        origin: The checkpoint of another run from which weights or state came.
    """
    rows = [
        row
        for row in read_history(path)
        if row["step"] < step or (row["step"] == step and row["config"] == config)
    ]
    if not rows or rows[-1]["config"] != config:
        row: dict[str, Any] = {"step": step}
        if origin is not None:
            row["from"] = origin
        if rows:
            row["changes"] = changes(rows[-1]["config"], config)
        rows.append({**row, "config": config})
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_history(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a history, and skip damaged lines."""
    try:
        content = read_bytes(path, limit=_MAX_BYTES, within=path.parent)
    except MissingFileError:
        return []
    rows = []
    for line in content.splitlines():
        try:
            row = parse_json(line, name=path)
        except FileError:
            continue
        if isinstance(row, dict) and isinstance(row.get("config"), dict):
            step = row.get("step")
            rows += [row] if type(step) is int else []
    return rows


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _shown(value: Any) -> str:
    return "null" if value is None else json.dumps(value).strip('"')
