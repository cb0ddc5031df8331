"""Poolings of an image's features into one vector, as frozen values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mt_files import Checks

from mt_model.attention.cross_attention_config import CrossAttentionConfig
from mt_model.block.sizes import MAX_WIDTH
from mt_model.feed_forward.mlp_config import MLPConfig

if TYPE_CHECKING:
    from torch import nn

    from mt_model.block.shard_context import ShardContext
    from mt_model.block.stream import StreamConfig


@dataclass(frozen=True, kw_only=True)
class PoolingConfig(ABC):
    """A pooling of an image's features. Each kind is a dataclass derived from this one.

    Its module is called with [B, S, hidden], whole on every rank, and returns [B, size].
    """

    type_name: ClassVar[str]
    default_kind: ClassVar[str] = "class"
    needs_class_token: ClassVar[bool] = False

    @abstractmethod
    def build(self, stream: StreamConfig, *, layer: int, shard: ShardContext) -> nn.Module:
        """Build the module on the meta device.

        Args:
            stream: The residual stream of the model.
            layer: Layer index of the pooling's own modules, after the last layer.
            shard: This rank's share of the model.
        """

    @abstractmethod
    def num_parameters(self, stream: StreamConfig) -> int:
        """Count the parameters."""

    @abstractmethod
    def flops(self, stream: StreamConfig) -> int:
        """Count the operations of forward and backward for an image; a multiply-add is two."""

    def size(self, hidden_size: int) -> int:
        """Return the width of the vector."""
        return hidden_size

    def split_sizes(self, tp: int) -> Iterable[tuple[str, int]]:
        """Give the names and values of the sizes that `tp` ranks must divide."""
        del tp
        return ()


@dataclass(frozen=True, kw_only=True)
class ClassPoolingConfig(PoolingConfig):
    """The class token's features.

    Attributes:
        norm: Norm of the class token's features (CLIP).
        dense_size: Width of a following layer `tanh(W x + b)` (ViT); None for no layer.
    """

    type_name: ClassVar[str] = "class"
    needs_class_token: ClassVar[bool] = True
    norm: bool = False
    dense_size: int | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "dense_size")
        checks.at_most(MAX_WIDTH, "dense_size")
        checks.done()

    def build(self, stream: StreamConfig, *, layer: int, shard: ShardContext) -> nn.Module:
        """Build a `ClassPooling`."""
        from mt_model.vision.pooling import ClassPooling

        return ClassPooling(self, stream, layer=layer, shard=shard)

    def num_parameters(self, stream: StreamConfig) -> int:
        """Count the parameters of the norm and the layer."""
        norm = stream.norm.num_parameters(stream.hidden_size) if self.norm else 0
        return norm + (self.dense_size or 0) * (stream.hidden_size + 1)

    def flops(self, stream: StreamConfig) -> int:
        """Count the layer's products."""
        return 6 * stream.hidden_size * (self.dense_size or 0)

    def size(self, hidden_size: int) -> int:
        """Return the width of the layer, where there is one."""
        return hidden_size if self.dense_size is None else self.dense_size


@dataclass(frozen=True, kw_only=True)
class AttentionPoolingConfig(PoolingConfig):
    """Attention of a learned query to the features, followed by a feed-forward (SigLIP).

    With q the query and n a norm, `y = attention(q, x)` and the vector is `y + f(n(y))`. All
    projections of the attention have biases.

    Attributes:
        num_heads: Number of heads of the attention.
        head_dim: Width of one head.
        feed_forward: Feed-forward, without dropout.
    """

    type_name: ClassVar[str] = "attention"
    num_heads: int
    head_dim: int
    feed_forward: MLPConfig

    def __post_init__(self) -> None:
        checks = Checks(self)
        if not checks.errors and self.feed_forward.drops:
            text = f"{self.feed_forward.dropout}, and a pooling drops nothing; leave it out"
            checks.add("feed_forward.dropout", text)
        checks.done()
        _ = self.attention  # checks the sizes

    @property
    def attention(self) -> CrossAttentionConfig:
        """The attention, whose memory are the features."""
        return CrossAttentionConfig(
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            qkv_bias=True,
            out_bias=True,
        )

    def build(self, stream: StreamConfig, *, layer: int, shard: ShardContext) -> nn.Module:
        """Build an `AttentionPooling`."""
        from mt_model.vision.pooling import AttentionPooling

        return AttentionPooling(self, stream, layer=layer, shard=shard)

    def num_parameters(self, stream: StreamConfig) -> int:
        """Count the parameters of the query, the attention, the norm and the feed-forward."""
        hidden = stream.hidden_size
        total = hidden + stream.norm.num_parameters(hidden)
        return sum(
            (entry.num_parameters(hidden) for entry in (self.attention, self.feed_forward)), total
        )

    def flops(self, stream: StreamConfig) -> int:
        """Count the products of one query with keys and values of all features."""
        hidden, heads, length = stream.hidden_size, self.num_heads, stream.max_sequence_length
        width = heads * self.head_dim
        attention = 12 * hidden * width + 12 * length * (hidden * width + width)
        return attention + self.feed_forward.flops_per_token(hidden, 1)

    def split_sizes(self, tp: int) -> Iterable[tuple[str, int]]:
        """Give the heads and the width of the feed-forward."""
        yield from self.attention.split_sizes(tp)
        yield from self.feed_forward.split_sizes(tp)
