"""Imports that come at the first use of a name, and imports that take less time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without the garbage collector, which takes a third of the time of `import torch`.

    Modules live as long as the process, so the collector passes over what is there at the end of
    the block from then on, and when Python exits.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
