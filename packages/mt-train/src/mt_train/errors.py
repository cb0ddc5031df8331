"""Errors that are a user's to solve: shown as one message, without a traceback."""

from __future__ import annotations

import torch
from mt_ckpt import CheckpointError
from mt_data import DataError
from mt_parallel_state import CollectiveError, JoinError, PeerLostError

from mt_train.problem import ConfigError
from mt_train.saved import ResumeError
from mt_train.session import LaunchError
from mt_train.trainer import NonFiniteLossError

USER_ERRORS = (
    CheckpointError,
    CollectiveError,
    DataError,
    JoinError,
    LaunchError,
    PeerLostError,
    ResumeError,
    NonFiniteLossError,
    ImportError,
    OSError,
)


# Raised on every rank with the same text.
ALIKE_ERRORS = (ConfigError, ResumeError, NonFiniteLossError)

# The CPU's allocator has no exception of its own.
_CPU_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether an error, or what caused it, is a device that ran out of memory."""
    while error is not None:
        on_cpu = isinstance(error, RuntimeError) and any(
            text in str(error) for text in _CPU_OUT_OF_MEMORY
        )
        if on_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        error = error.__cause__
    return False
