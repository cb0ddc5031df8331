"""What can be wrong with a recipe, its data or a quantised checkpoint."""

from __future__ import annotations

from mt_files import UserError


class QuantizationError(UserError, ValueError):
    """A model can't be quantised, or read back, as it was asked for; nothing was written."""


class CalibrationError(QuantizationError):
    """The calibration data is missing, empty or not finite."""
