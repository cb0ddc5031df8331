"""Checks of numbers and switches that users give."""

from __future__ import annotations

from typing import Any

LARGEST_LR = 3.4028234663852886e38  # of fp32, whose weights a larger one makes infinite


def check_size(what: str, value: Any) -> float:
    """Return a non-negative number.

    Raises:
        TypeError: It is not a number.
        ValueError: It is negative, or fp32 cannot hold it.
    """
    if not 0 <= check_number(what, value) <= LARGEST_LR:
        raise ValueError(f"{what} must be 0 or more and finite, got {value}")
    return value


def check_function(what: str, value: object, *, optional: bool = False) -> None:
    """Check a function, which may be None if it is optional.

    Raises:
        TypeError: It is not a function.
    """
    if not callable(value) and not (optional and value is None):
        raise TypeError(f"{what} must be a function{' or None' * optional}, got {value!r:.60}")


def check_count(what: str, value: Any, *, least: int = 1) -> int:
    """Return a whole number of at least `least`.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is less.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} must be a whole number, got {kind_of(value)}")
    if value < least:
        raise ValueError(f"{what} must be {least} or more, got {value}")
    return value


def check_number(what: str, value: Any) -> float:
    """Return a real number, or raise TypeError."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{what} must be a number, got {kind_of(value)}")
    return value


def check_positive(what: str, value: float) -> None:
    """Check a limit.

    Raises:
        ValueError: It is not positive.
        TypeError: It is not a number.
    """
    if not check_number(what, value) > 0:
        raise ValueError(f"{what} must be positive (None for no limit), got {value}")


def check_fraction(what: str, value: Any) -> None:
    """Check a decay rate.

    Raises:
        TypeError: It is no number.
        ValueError: It is not in [0, 1).
    """
    if not 0 <= check_number(what, value) < 1:
        raise ValueError(f"{what} must be a number in [0, 1), got {value}")


def check_betas(betas: Any) -> None:
    """Check a pair of decay rates.

    Raises:
        TypeError: One is no number.
        ValueError: They are not two, or one is not in [0, 1).
    """
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
    if not all(0 <= check_number("betas", beta) < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")


def check_bool(what: str, value: Any) -> None:
    """Check a switch.

    Raises:
        TypeError: It is no bool.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, got {value!r:.60}")


def kind_of(value: Any) -> str:
    """Describe a value in an error: a tensor by its shape, anything else by value and type."""
    if hasattr(value, "shape"):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r:.60} ({type(value).__name__})"
