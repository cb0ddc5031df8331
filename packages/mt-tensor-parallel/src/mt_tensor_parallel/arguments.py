"""Checks of arguments: types first, then values that cannot work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from mt_files import check_type
from torch import Tensor

_LARGEST = 1 << 36


def positive_int(value: object, name: str) -> int:
    """Return a size, or raise TypeError or ValueError."""
    check_type(name, value, int)
    size = cast("int", value)
    if size < 1:
        raise ValueError(f"{name} must be at least 1, got {size!r}")
    return size


def check_number(value: object, name: str) -> None:
    """Raise TypeError unless the value is a number, and ValueError for NaN and infinity."""
    if not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not -math.inf < value < math.inf:  # dynamo does not trace math.isfinite
        raise ValueError(f"{name}={value} must be finite")


def check_labels(labels: object, name: str) -> None:
    """Raise TypeError unless `labels` is a tensor of integers."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"{name} must be a tensor of integers, such as int64, got {got}")


def check_volume(shape: Sequence[int], what: str) -> None:
    """Raise ValueError for a tensor that no machine holds, before its values are drawn."""
    if math.prod(shape) > _LARGEST:
        raise ValueError(
            f"{what} of shape {tuple(shape)} has {math.prod(shape):,} elements, more than the "
            f"{_LARGEST:,} that are drawn at once; check the sizes, or build on device='meta'"
        )
