"""Errors of recipes, calibration data and quantised checkpoints."""

from __future__ import annotations

from mt_files import UserError


class QuantizationError(UserError, ValueError):
    """A model can't be quantised or loaded as requested; nothing was written."""


class CalibrationError(QuantizationError):
    """The calibration data is missing, empty or not finite."""
