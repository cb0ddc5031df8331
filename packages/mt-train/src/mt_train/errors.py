"""Errors that are a user's to solve: shown as one message, without a traceback."""

from __future__ import annotations

import torch
from mt_ckpt import CheckpointError
from mt_data import DataError
from mt_parallel_state import CollectiveError

from mt_train.corpus import CorpusError
from mt_train.saving import ResumeError
from mt_train.session import LaunchError
from mt_train.trainer import NonFiniteLossError

USER_ERRORS = (
    CheckpointError,
    CollectiveError,
    CorpusError,
    DataError,
    LaunchError,
    ResumeError,
    NonFiniteLossError,
    ImportError,
    OSError,
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether an error, or what caused it, is a device that ran out of memory."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return error is not None
