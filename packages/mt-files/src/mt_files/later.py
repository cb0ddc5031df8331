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
from types import ModuleType
from typing import Any

_LONGEST = 200


def resolve_later(package: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package whose `__init__` states each public name once.

    `from mt_x.part import Part as Part` makes a name public, for type checkers too; under
    `if TYPE_CHECKING:` the import happens at the name's first use. `__all__` is made of both.

    Args:
        package: The package's `__name__`.
    """

    def resolve(name: str) -> Any:
        public, later = _public_names(package)
        if name == "__all__":
            return public
        if name not in later:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(later[name]), name)

    return resolve


@cache
def _public_names(package: str) -> tuple[list[str], dict[str, str]]:
    """Return a package's public names, and the modules of those that it imports at first use."""
    source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
    body = ast.parse(source).body
    blocks = [each for each in body if isinstance(each, ast.If)]
    typing = [each for each in blocks if ast.unparse(each.test) == "TYPE_CHECKING"]
    later = _named_as_themselves([each for block in typing for each in block.body])
    return sorted({**_named_as_themselves(body), **later}), later


def _named_as_themselves(statements: list[ast.stmt]) -> dict[str, str]:
    """Return the module of each name of `from module import name as name`."""
    return {
        alias.name: statement.module
        for statement in statements
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
        if alias.asname == alias.name
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


class MissingExtraError(ImportError):
    """An optional library is missing."""


def require(module: str, what: str) -> ModuleType:
    """Import an optional library, or say which extra installs it.

    Args:
        module: Name of the module.
        what: What needs it, as the message's subject.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        distribution = module.partition(".")[0]
        if error.name not in (module, distribution):
            raise
        raise MissingExtraError(f"{what} needs: pip install {distribution}") from error
