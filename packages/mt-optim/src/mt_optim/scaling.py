"""Many tensors, and a number that lies on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def multiply_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place, each by the factor in its own dtype.

    The bits are those of a factor that is a number of Python.
    """
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        torch._foreach_mul_([x for x in tensors if x.dtype == dtype], factor.to(dtype))


def clamp_(tensors: Sequence[Tensor], most: Tensor) -> None:
    """Have no element of any tensor be of a greater magnitude, in place."""
    for x in tensors:
        bound = most.to(x.dtype)
        x.clamp_(-bound, bound)
