"""Errors of the package."""

from __future__ import annotations

from mt_files import UserError


class TokenizerError(UserError, ValueError):
    """A tokenizer, or a text for it, is wrong; the message says how to fix it."""


class TokenizerFileError(TokenizerError):
    """The content of a tokenizer's file does not follow its format.

    Attributes:
        path: The file at fault.
        problem: Description of the problem.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path, self.problem = path, problem

    def __reduce__(self) -> tuple[type[TokenizerFileError], tuple[str, str]]:
        return type(self), (self.path, self.problem)


def is_library_error(error: BaseException) -> bool:
    """Return whether an exception comes from a library, including a panic of Rust code.

    A panic is a `BaseException`, but not a request to stop.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
