"""RMSNorm over the last dim, and the norm that a configuration describes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mt_fusions
import torch
from mt_kernels import AUTO, Choice, Selector
from torch import Tensor, nn

from mt_model.block.initial import start_from
from mt_model.block.layer_norm import LayerNorm
from mt_model.block.norm_config import NormConfig
from mt_model.block.shard_context import ShardContext
from mt_model.block.stream import StreamConfig


class RMSNorm(nn.Module):
    """RMSNorm, with a weight or without, and no bias.

    Args:
        size: Size of the last dim.
        eps: Number added to the mean square.
        dtype: Dtype of the weight.
        zero_centered: The weight w stands for 1 + w, and starts at 0.
        rounds_first: The weight multiplies after the rounding to the dtype of the input.
        weight: Whether there is a weight.
        kernel: A candidate of `mt_fusions.RMS_NORM`, by name.

    Shape:
        forward(x): [..., size] -> [..., size].
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        dtype: torch.dtype,
        zero_centered: bool = False,
        rounds_first: bool = False,
        weight: bool = True,
        kernel: str = AUTO,
    ) -> None:
        super().__init__()
        self.selector = Selector(mt_fusions.RMS_NORM, kernel)
        self.size, self.eps = size, eps
        self.zero_centered, self.rounds_first = zero_centered, rounds_first
        self.weight: Tensor | None = None
        if weight:
            param = nn.Parameter(torch.empty(size, dtype=dtype, device="meta"))
            start_from(param, "zeros" if zero_centered else "ones")
            self.weight = param

    def factor(self) -> Tensor | None:
        """Return the factor of the normalised value: the weight, or 1 + w where zero-centred."""
        return self.weight + 1 if self.weight is not None and self.zero_centered else self.weight

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise the last dim; with a residual, normalise the sum and return it too."""
        form = {"zero_centered": self.zero_centered, "rounds_first": self.rounds_first}
        if residual is None:
            kernel = self.selector.find(x, self.weight)
            return kernel.function(x, self.weight, self.eps, **form)
        kernel = mt_fusions.fused_kernel(x)
        return mt_fusions.add_rms_norm(x, residual, self.weight, self.eps, **form, kernel=kernel)

    def kernel_choices(self, like: Tensor) -> Iterator[Choice[Any]]:
        """Yield the kernel for tensors with the device and dtype of `like`."""
        yield self.selector.choose(like.new_empty(0, self.size), self.weight)


def build_rms_norm(
    config: NormConfig, size: int, *, dtype: torch.dtype, kernel: str = AUTO
) -> RMSNorm:
    """Build an RMSNorm on the meta device as `config` describes it, whatever its kind."""
    return RMSNorm(
        size,
        eps=config.eps,
        dtype=dtype,
        zero_centered=config.zero_centered,
        rounds_first=config.rounds_first,
        weight=config.weight,
        kernel=kernel,
    )


def build_norm(
    config: NormConfig, size: int, *, dtype: torch.dtype, kernel: str = AUTO
) -> RMSNorm | LayerNorm:
    """Build the norm that `config` describes, on the meta device."""
    if config.kind == "rms":
        return build_rms_norm(config, size, dtype=dtype, kernel=kernel)
    norm = LayerNorm(
        size,
        eps=config.eps,
        zero_centered=config.zero_centered,
        weight=config.weight,
        bias=config.has_bias,
        dtype=dtype,
        kernel=kernel,
    )
    if config.weight:
        start_from(norm.weight, "zeros" if config.zero_centered else "ones")
    return norm


def stream_norm(stream: StreamConfig, shard: ShardContext) -> nn.Module:
    """Build a norm of the residual stream, which every rank has whole, on the meta device."""
    norm = build_norm(stream.norm, stream.hidden_size, dtype=shard.dtype, kernel=shard.kernels.norm)
    shard.mark_replicated(norm, partial=shard.sequence_parallel)
    return norm
