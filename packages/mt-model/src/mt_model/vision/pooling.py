"""Poolings of an image's features into one vector."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from mt_parallel_state import PartitionSpec, shard_param
from mt_tensor_parallel import ColumnParallelLinear
from torch import Tensor, nn

from mt_model.attend.context import ForwardContext
from mt_model.attention.cross_attention import CrossAttention
from mt_model.block.initial import start_from
from mt_model.block.norm import stream_norm
from mt_model.block.shard_context import ShardContext
from mt_model.block.stream import StreamConfig
from mt_model.feed_forward.mlp import MLP

if TYPE_CHECKING:
    from mt_model.vision.pooling_config import AttentionPoolingConfig, ClassPoolingConfig


def whole_linear(in_size: int, out_size: int, *, bias: bool, shard: ShardContext) -> Any:
    """Make a linear layer that every rank has whole, on the meta device.

    Args:
        in_size: Width of the input.
        out_size: Width of the output.
        bias: Whether the layer has a bias.
        shard: This rank's share of the model.
    """
    arguments = {**shard.linear_arguments(), "group": None, "sequence_parallel": False}
    return ColumnParallelLinear(in_size, out_size, bias=bias, **arguments)


def _norm(stream: StreamConfig, shard: ShardContext) -> nn.Module:
    """Return a norm of features that every rank has whole, with whole gradients."""
    return stream_norm(stream, replace(shard, sequence_parallel=False))


class ClassPooling(nn.Module):
    """The first token's features, with a norm and `tanh(W x + b)` where there are some.

    Parameters: `norm.*`, `dense.weight` [size, hidden] and `dense.bias`. Every rank has them whole.

    Args:
        config: Configuration of the pooling.
        stream: The residual stream of the model.
        layer: Index of the module, after the last layer.
        shard: This rank's share of the model.

    Shape:
        forward(x): [B, S, hidden] -> [B, size].
    """

    def __init__(
        self, config: ClassPoolingConfig, stream: StreamConfig, *, layer: int, shard: ShardContext
    ) -> None:
        super().__init__()
        self.norm = _norm(stream, shard) if config.norm else None
        size = config.dense_size
        self.dense = None
        if size is not None:
            self.dense = whole_linear(stream.hidden_size, size, bias=True, shard=shard)

    def forward(self, x: Tensor) -> Tensor:
        """Pool the features."""
        x = x[:, 0]
        x = x if self.norm is None else self.norm(x)
        return x if self.dense is None else torch.tanh(self.dense(x))


class AttentionPooling(nn.Module):
    """Attention of a learned query to the features, followed by a norm and a feed-forward.

    Parameters: `query` [hidden] and `norm.*`, whole on every rank; `attention.*` as of
    `CrossAttention` and `feed_forward.*` as of `MLP`, split over "tp". The collectives are theirs.

    Args:
        config: Configuration of the pooling.
        stream: The residual stream of the model.
        layer: Index of the module, after the last layer.
        shard: This rank's share of the model.

    Shape:
        forward(x): [B, S, hidden] -> [B, hidden].
    """

    def __init__(
        self,
        config: AttentionPoolingConfig,
        stream: StreamConfig,
        *,
        layer: int,
        shard: ShardContext,
    ) -> None:
        super().__init__()
        whole = replace(shard, sequence_parallel=False)
        size = stream.hidden_size
        query = nn.Parameter(torch.empty(size, dtype=shard.dtype, device="meta"))
        start_from(query, "embedding")
        self.query = shard_param(query, PartitionSpec())
        self.attention = CrossAttention(config.attention, size, layer=layer, shard=whole)
        self.norm = _norm(stream, shard)
        self.feed_forward = MLP(config.feed_forward, stream, layer=layer, shard=whole)
        self.context = shard.context

    def forward(self, x: Tensor) -> Tensor:
        """Pool the features."""
        query = self.query.expand(x.shape[0], 1, -1)
        y = self.attention(query, ForwardContext(attend=self.context, memory=x))
        return (y + self.feed_forward(self.norm(y)))[:, 0]
