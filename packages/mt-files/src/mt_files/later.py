"""Public names that are imported at their first use, to keep the import of a package short."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def resolve_later(package: str, **names: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: Its `__name__`.
        names: For each of its modules the public names in it, separated by spaces.

    Example:
        __getattr__ = resolve_later(__name__, session="Outcome run", trainer="Trainer")
    """
    homes = {name: module for module, listed in names.items() for name in listed.split()}

    def resolve(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return resolve
