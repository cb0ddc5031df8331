"""Errors that a user can solve, shown as one message without a traceback."""

from __future__ import annotations

from mt_files import MissingExtraError, UserError
from mt_parallel_state import is_out_of_memory
from torch.distributed import DistError

_FAILED, _BAD_COMMAND = 1, 2


def explain(error: Exception) -> tuple[int, str] | None:
    """Return an error's exit code and message, or None for a bug in this program."""
    if is_out_of_memory(error):
        return _FAILED, (
            "out of memory: use --dtype bf16 or fewer --max-tokens, or more processes on several "
            f"GPUs, which split the model ({str(error) or type(error).__name__})"
        )
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return _FAILED, f"{error.filename}: {error.strerror}"
    if isinstance(error, UserError | MissingExtraError | DistError | OSError):
        return _FAILED, str(error)
    return (_BAD_COMMAND, str(error)) if isinstance(error, ValueError) else None
