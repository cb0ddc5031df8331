"""Errors that users of the package can catch."""

from __future__ import annotations

import importlib
from types import ModuleType


class DataError(ValueError):
    """Data or arguments that do not fit together; the message says how to fix it."""


class DataFileError(DataError):
    """A file whose content is not what its format demands.

    Attributes:
        path: the file at fault.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem

    def __reduce__(self) -> tuple[type[DataFileError], tuple[str, str]]:
        return type(self), (self.path, self.problem)


class MissingExtraError(ImportError):
    """An optional library is needed for what was asked."""


def require(module: str, extra: str, what: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise MissingExtraError(f"{what} needs: pip install 'mt-data[{extra}]'") from error
