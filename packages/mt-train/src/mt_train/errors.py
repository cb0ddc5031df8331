"""Errors that are a user's to solve: shown as one message, without a traceback."""

from __future__ import annotations

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
