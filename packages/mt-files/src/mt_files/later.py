"""Imports at the first use of a name, and faster imports."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def resolve_later(package: str, **names: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports its public names at first use.

    Args:
        package: The package's `__name__`.
        names: The public names of each module, separated by spaces.

    Example:
        __getattr__ = resolve_later(__name__, session="Outcome run", trainer="Trainer")
    """
    homes = {name: module for module, listed in names.items() for name in listed.split()}

    def resolve(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return resolve


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without the garbage collector, which takes a third of the time of `import torch`.

    Modules live as long as the process, so at the end of the block all objects are frozen: later
    collections, and Python's exit, skip them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
