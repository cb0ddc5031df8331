"""Names of a command's options, from the fields of its dataclass."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def options_of(command: type[Any]) -> tuple[list[str], list[str]]:
    """Return the names of a command's options with a value, and of its switches."""
    named = [field for field in fields(command) if "Positional" not in str(field.type)]
    switches = [field.name for field in named if field.type == "bool"]
    return [field.name for field in named if field.name not in switches], switches


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return f"--{name.replace('_', '-')}"
