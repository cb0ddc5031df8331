"""Operations of many tensors with a number on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SPLIT = 2.0**27 + 1  # parts a number of fp64 into halves of its bits


def multiply_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place, each by the factor in its own dtype.

    The result has the same bits as with a Python number.
    """
    for device, dtype in dict.fromkeys((x.device, x.dtype) for x in tensors):
        alike = [x for x in tensors if (x.device, x.dtype) == (device, dtype)]
        torch._foreach_mul_(alike, factor.to(device, dtype))


def clamp_(tensors: Sequence[Tensor], most: Tensor) -> None:
    """Clamp the magnitude of all elements to `most`, in place."""
    for x in tensors:
        bound = most.to(x.device, x.dtype)
        x.clamp_(-bound, bound)


def root(x: Tensor) -> Tensor:
    """Return the correctly rounded square root in fp64, as Python does.

    torch's root is sometimes off by the last bit on a CPU. Its remainder, exact by Dekker's product
    (Numerische Mathematik 18, 1971), corrects it.
    """
    near = x.sqrt()
    scaled = near * _SPLIT
    high = scaled - (scaled - near)
    low, square = near - high, near * near
    missed = ((high * high - square) + 2 * high * low) + low * low
    exact = near + ((x - square) - missed) / (2 * near)
    return torch.where(torch.isfinite(exact), exact, near)
