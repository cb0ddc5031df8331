"""Errors about folders of Hugging Face."""

from __future__ import annotations

from mt_files import UserError


class ExchangeError(UserError, ValueError):
    """A folder can't be read as a model, or a model can't be written as a folder."""


class NotFiniteError(ExchangeError):
    """A weight in a file is not finite."""

    exit_status = 1
