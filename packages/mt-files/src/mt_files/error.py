"""Errors that name the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

_LONGEST, _PART = 1000, 400


class UserError(Exception):
    """An error that the user of a program can solve: the program shows no traceback.

    Packages derive their errors from it, so that a program need not list them.

    Attributes:
        exit_status: Exit status of a command that ends with this error.
    """

    exit_status: ClassVar[int] = 2


class FileError(OSError):
    """A file that can't be read or written, or whose content is refused.

    Attributes:
        path: The file at fault.
        problem: Description of the problem.
    """

    def __init__(self, path: str | Path, problem: str) -> None:
        super().__init__(f"{printable(path)}: {problem}")
        self.path = str(path)
        self.problem = problem

    def __reduce__(self) -> tuple[type[FileError], tuple[str, str]]:
        return type(self), (self.path, self.problem)


class MissingFileError(FileError, FileNotFoundError):
    """There is no such file."""


class ObjectError(FileError):
    """An object that can't be read or written, or a store that does not answer."""


class LockedError(FileError):
    """Another process holds the lock."""


def printable(path: str | Path) -> str:
    """Return a printable path: invalid UTF-8 is escaped, and a long path loses its middle."""
    try:
        content = os.fsencode(path)
    except UnicodeEncodeError:  # no path of this system, but a text that a file names as one
        content = str(path).encode(errors="backslashreplace")
    text = content.decode(errors="backslashreplace")
    return text if len(text) <= _LONGEST else f"{text[:_PART]}...{text[-_PART:]}"


def system_error(path: str | Path, action: str, error: OSError) -> FileError:
    """Return a FileError with the operating system's message."""
    kind = MissingFileError if isinstance(error, FileNotFoundError) else FileError
    return kind(path, f"cannot {action}: {error.strerror or error}")
