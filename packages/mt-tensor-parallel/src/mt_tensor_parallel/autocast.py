"""The casts of autocast, for products inside autograd functions."""

from __future__ import annotations

import torch
from torch import Tensor


def as_autocast(x: Tensor) -> Tensor:
    """Return `x` in autocast's dtype, or `x` itself where autocast would not cast it.

    The forward of an autograd function runs under autocast and its backward does not, so operands
    are cast before the function, and autograd casts their gradients back. As in torch, fp64 and
    integers are not cast.

    Shape:
        x: any. Returns the same.
    """
    device = x.device.type
    if x.is_meta or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def check_dtypes(x: Tensor, weight: Tensor, name: str) -> None:
    """Raise TypeError if the operands of a product differ in dtype, outside of autocast."""
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{name} is {x.dtype} and the weight {weight.dtype}; convert one of them, for example "
            f"with {name}.to({weight.dtype}), or run under torch.autocast"
        )
