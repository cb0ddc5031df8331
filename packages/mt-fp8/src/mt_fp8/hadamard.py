"""A rotation of each 16 neighbours, by which an outlier is spread over all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_fp8.scaling import HADAMARD

# One fixed choice of signs, the same for every tensor: only then does it cancel in a product.
SIGNS = (1, 1, -1, 1, -1, -1, -1, 1, 1, -1, 1, 1, 1, -1, -1, 1)


def rotate(x: Tensor) -> Tensor:
    """Return `(x * signs) @ H / 4` of each 16 neighbours, for the Hadamard matrix H of 16.

    The sums are made in four rounds of pairs, so that every device has the same bits. Where one of
    the neighbours is not finite, all become NaN.

    Shape:
        x: [..., 16 n] of fp32. Returns the same.
    """
    x = torch.where(x.isinf(), torch.nan, x)
    # Divided by 16 first, sums stay in range: else infinities of both signs could meet.
    return _butterflies(_groups(x) * (_signs(x) / 16)).mul_(4).view(x.shape)


def rotate_back(x: Tensor) -> Tensor:
    """Undo `rotate`, up to rounding."""
    return (_butterflies(_groups(x)).mul_(0.25) * _signs(x)).view(x.shape)


def check_rotates(columns: int) -> None:
    """Raise ValueError where rows can't be rotated."""
    if columns % HADAMARD:
        raise ValueError(
            f"hadamard rotates {HADAMARD} elements at a time, and the last dim is {columns}; "
            f"make it a multiple of {HADAMARD}, or leave hadamard out"
        )


def _groups(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // HADAMARD, HADAMARD)


def _signs(x: Tensor) -> Tensor:
    return torch.tensor(SIGNS, dtype=x.dtype, device=x.device)


def _butterflies(x: Tensor) -> Tensor:
    for width in (1, 2, 4, 8):
        pairs = x.unflatten(-1, (-1, 2, width))
        first, second = pairs.unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
    return x
