"""What makes one vector of the features of an image."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from mt_parallel_state import PartitionSpec, shard_param
from mt_tensor_parallel import ColumnParallelLinear
from torch import Tensor, nn

from mt_model.attend import Pass
from mt_model.cross_attention import CrossAttention
from mt_model.initialization import start_from
from mt_model.mlp import MLP
from mt_model.norm import stream_norm
from mt_model.placement import Placement
from mt_model.pooling_config import (
    AttentionPoolingConfig,
    ClassPoolingConfig,
    MeanPoolingConfig,
)
from mt_model.stack_config import StackConfig


def whole_linear(in_size: int, out_size: int, *, bias: bool, placement: Placement) -> Any:
    """Make a linear layer that every rank has whole, on the meta device.

    Args:
        in_size: Width of the input.
        out_size: Width of the output.
        bias: There is one.
        placement: Of this rank.
    """
    arguments = {**placement.linear_arguments(), "group": None, "sequence_parallel": False}
    return ColumnParallelLinear(in_size, out_size, bias=bias, **arguments)


def _norm(model: StackConfig, placement: Placement) -> nn.Module:
    """A norm of what every rank has whole, whose gradients are so too."""
    return stream_norm(model, replace(placement, sequence_parallel=False))


class ClassPooling(nn.Module):
    """The first token's features, with a norm and `tanh(W x + b)` where there are some.

    Parameters: `norm.*`, `dense.weight` [size, hidden] and `dense.bias`. Every rank has them whole.

    Args:
        config: Of the pooling.
        model: Of the whole model.
        placement: Of this rank.

    Shape:
        forward(x): [B, S, hidden] -> [B, size].
    """

    def __init__(
        self, config: ClassPoolingConfig, model: StackConfig, *, placement: Placement
    ) -> None:
        super().__init__()
        self.norm = _norm(model, placement) if config.norm else None
        size = config.dense_size
        self.dense = None
        if size is not None:
            self.dense = whole_linear(model.hidden_size, size, bias=True, placement=placement)

    def forward(self, x: Tensor) -> Tensor:
        """Pool the features."""
        x = x[:, 0]
        x = x if self.norm is None else self.norm(x)
        return x if self.dense is None else torch.tanh(self.dense(x))


class MeanPooling(nn.Module):
    """The mean of features, normed where there is a norm.

    Parameters: `norm.*`. Every rank has them whole.

    Args:
        config: Of the pooling.
        model: Of the whole model.
        placement: Of this rank.

    Shape:
        forward(x): [B, S, hidden] -> [B, hidden].
    """

    def __init__(
        self, config: MeanPoolingConfig, model: StackConfig, *, placement: Placement
    ) -> None:
        super().__init__()
        self.norm = _norm(model, placement) if config.norm else None

    def forward(self, x: Tensor) -> Tensor:
        """Pool the features."""
        x = x.mean(1)
        return x if self.norm is None else self.norm(x)


class AttentionPooling(nn.Module):
    """Attention of a learned query to the features, and a feed-forward with its norm behind it.

    Parameters: `query` [hidden] and `norm.*`, whole on every rank; `attention.*` as of
    `CrossAttention` and `feed_forward.*` as of `MLP`, split over "tp". The collectives are theirs.

    Args:
        config: Of the pooling.
        model: Of the whole model.
        placement: Of this rank.

    Shape:
        forward(x): [B, S, hidden] -> [B, hidden].
    """

    def __init__(
        self, config: AttentionPoolingConfig, model: StackConfig, *, placement: Placement
    ) -> None:
        super().__init__()
        whole = replace(placement, sequence_parallel=False)
        size = model.hidden_size
        query = nn.Parameter(torch.empty(size, dtype=placement.dtype, device="meta"))
        start_from(query, "embedding")
        self.query = shard_param(query, PartitionSpec())
        self.attention = CrossAttention(
            config.attention, size, layer=model.num_layers, placement=whole
        )
        self.norm = _norm(model, placement)
        self.feed_forward = MLP(config.feed_forward, model, layer=model.num_layers, placement=whole)
        self.context = placement.context

    def forward(self, x: Tensor) -> Tensor:
        """Pool the features."""
        query = self.query.expand(x.shape[0], 1, -1)
        y = self.attention(query, Pass(attend=self.context, memory=x))
        return (y + self.feed_forward(self.norm(y)))[:, 0]
