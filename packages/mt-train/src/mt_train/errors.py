"""Errors that are a user's to solve: shown as one message, without a traceback."""

from __future__ import annotations

from mt_ckpt import CheckpointError
from mt_data import DataError

from mt_train.corpus import CorpusError
from mt_train.saving import ResumeError
from mt_train.trainer import NonFiniteLossError

USER_ERRORS = (
    CheckpointError,
    CorpusError,
    DataError,
    ResumeError,
    NonFiniteLossError,
    ImportError,
    OSError,
)
