"""Errors that are a user's to solve: shown as one message, without a traceback."""

from __future__ import annotations

from mt_ckpt import CheckpointError
from mt_data import DataError
from mt_parallel_state import CollectiveError, is_out_of_memory
from torch.distributed import DistError

from mt_infer.loading import RunError

_FAILED, _BAD_COMMAND = 1, 2

# The first kind that fits gives the exit code: a DataError is a ValueError too.
USER_ERRORS: tuple[tuple[type[Exception], int], ...] = (
    (RunError, _FAILED),
    (CheckpointError, _FAILED),
    (DataError, _FAILED),
    (CollectiveError, _FAILED),
    (DistError, _FAILED),
    (OSError, _FAILED),
    (ValueError, _BAD_COMMAND),
)


def explain(error: Exception) -> tuple[int, str] | None:
    """Exit code and message of an error; None for one that only a programmer can solve."""
    if is_out_of_memory(error):
        return _FAILED, (
            "out of memory: use --dtype bf16 or fewer --max-tokens, or more processes on several "
            f"GPUs, which split the model ({str(error) or type(error).__name__})"
        )
    for kind, code in USER_ERRORS:
        if isinstance(error, kind):
            return code, _sentence(error)
    return None


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
