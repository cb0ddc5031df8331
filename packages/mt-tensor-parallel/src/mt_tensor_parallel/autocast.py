"""What autocast does to the operands of a product, for products inside autograd functions."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_autocast"]


def as_autocast(x: Tensor) -> Tensor:
    """``x`` in autocast's dtype; outside of autocast, or where its rule leaves it alone, ``x``.

    The forward of an autograd function runs under autocast and its backward does not, so operands
    are cast before the function, and autograd casts their gradients back. As in torch, fp64 and
    integers stay what they are.

    Shape:
        x: any. Returns the same.
    """
    device = x.device.type
    if x.is_meta or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
