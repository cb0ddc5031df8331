"""LayerNorm over the last dim (Ba et al., 2016)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mt_fusions
import torch
from mt_kernels import AUTO, Choice, Selector
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, by one of several kernels.

    Args:
        size: Size of the last dim.
        eps: Number added to the variance.
        zero_centered: The weight w stands for 1 + w.
        weight: Whether there is a weight.
        bias: Whether there is a bias beside the weight.
        dtype: Dtype of weight and bias.
        kernel: A candidate of `mt_fusions.LAYER_NORM`, by name.

    Shape:
        forward(input): [..., size] -> [..., size].
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        weight: bool,
        bias: bool,
        zero_centered: bool = False,
        dtype: torch.dtype,
        kernel: str = AUTO,
    ) -> None:
        like = {"dtype": dtype, "device": "meta"}
        super().__init__(size, eps=eps, elementwise_affine=weight, bias=bias, **like)
        self.zero_centered = zero_centered
        self.selector = Selector(mt_fusions.LAYER_NORM, kernel)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - with a residual only
        self, input: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise the last dim; with a residual, normalise the sum and return it too."""
        given = self.weight, self.bias, self.eps
        if residual is None:
            kernel = self.selector.find(input)
            return kernel.function(input, *given, zero_centered=self.zero_centered)
        how = {"zero_centered": self.zero_centered, "kernel": mt_fusions.fused_kernel(input)}
        return mt_fusions.add_layer_norm(input, residual, *given, **how)

    def kernel_choices(self, like: Tensor) -> Iterator[Choice[Any]]:
        """Yield the kernel for tensors with the device and dtype of `like`."""
        yield self.selector.choose(like.new_empty(0, 1))
