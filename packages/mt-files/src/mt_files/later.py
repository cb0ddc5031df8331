"""Imports at the first use of a name, and faster imports."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from typing import Any

_LONGEST = 200


def resolve_later(package: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports its public names at first use.

    The names are those that the package's `__init__` imports from its own modules under
    `if TYPE_CHECKING:`, so that type checkers and the run read the same statements.

    Args:
        package: The package's `__name__`.
    """

    def resolve(name: str) -> Any:
        homes = _typing_imports(package)
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return resolve


@cache
def _typing_imports(package: str) -> dict[str, str]:
    """Return the module of each name that a package imports from itself for type checkers."""
    source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
    return {
        alias.name: statement.module
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module
        if statement.module.startswith(f"{package}.")
        for alias in statement.names
    }


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


def import_failure(error: BaseException, library: str) -> str | None:
    """Return in one line why a library refused to be imported; None if the error is another one.

    Settings in the environment, such as TORCH_LOGS, may be what it refuses. A message that takes
    the library to find must not be tried then.
    """
    if library in sys.modules:
        return None
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    names = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    if library not in names:
        return None
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"{library} can't be imported: {first.strip()[:_LONGEST]}"
