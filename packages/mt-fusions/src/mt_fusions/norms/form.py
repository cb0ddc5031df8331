"""The form of a norm, and the results of its kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

Normed = tuple[Tensor, Tensor, Tensor, Tensor]  # y, sum, mean and inverse root
Stats = tuple[Tensor, Tensor]  # mean and inverse root of each row; RMSNorm has no mean
Grads = tuple[Tensor, Tensor, Tensor]  # of x, weight and bias, the last two in fp32 at least


class Form(NamedTuple):
    """The form of a norm.

    Attributes:
        eps: Added to the mean square.
        centered: Whether the mean is subtracted: LayerNorm.
        zero_centered: The weight w stands for 1 + w.
        rounds_first: The weight multiplies the rounded value.
        has_bias: Whether a bias is added.
    """

    eps: float
    centered: bool = False
    zero_centered: bool = False
    rounds_first: bool = False
    has_bias: bool = False
