"""Attention to a memory, as a frozen value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

from mt_files import Checks

from mt_model.attention.config import check_groups, split_heads
from mt_model.block.entry import MixerConfig
from mt_model.block.sizes import MAX_HEADS, MAX_WIDTH, Sizes

if TYPE_CHECKING:
    from torch import nn

    from mt_model.block.shard_context import ShardContext
    from mt_model.block.stream import StreamConfig


@dataclass(frozen=True, kw_only=True)
class CrossAttentionConfig(MixerConfig):
    """Softmax attention to a memory, the output of an encoder.

    The batch brings the memory (`batch["memory"]`, with `batch["memory_mask"]`). A decoder layer of
    T5 or Bart is two entries of the list: self-attention without a feed-forward, and this with one.

    Attributes:
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; each serves `num_heads // num_kv_heads` query
            heads.
        head_dim: Width of one head.
        memory_size: Width of the memory; the hidden size where None.
        qkv_bias: Bias of the projections to queries and to keys and values.
        out_bias: Bias of the output projection.
        dropout: Probability of dropping an attention weight in training.
        softcap: Scores become `softcap * tanh(score / softcap)`; None leaves them.
        scale: Scale of the scores; `head_dim ** -0.5` where None.
    """

    token_cache: ClassVar[Mapping[str, Literal["key", "value"]]] = MappingProxyType(
        {"key": "key", "value": "value"}
    )
    hides_padding: ClassVar[bool] = True
    needs_memory: ClassVar[bool] = True

    num_heads: int
    num_kv_heads: int
    head_dim: int
    memory_size: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    dropout: float = 0.0
    softcap: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        sizes = ("num_heads", "num_kv_heads", "head_dim")
        checks.at_least(1, *sizes, "memory_size")
        checks.at_most(MAX_HEADS, *sizes)
        checks.at_most(MAX_WIDTH, "memory_size")
        checks.fraction("dropout")
        checks.above(0, "softcap", "scale")
        checks.done()
        check_groups(checks, self.num_heads, self.num_kv_heads)
        checks.done()

    def build(self, stream: StreamConfig, *, layer: int, shard: ShardContext) -> nn.Module:
        """Build a `CrossAttention`."""
        from mt_model.attention.cross_attention import CrossAttention

        return CrossAttention(self, stream.hidden_size, layer=layer, shard=shard)

    def num_parameters(self, hidden_size: int) -> int:
        """Count weights and biases."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        memory = hidden_size if self.memory_size is None else self.memory_size
        total = query * (hidden_size + self.qkv_bias) + 2 * key * (memory + self.qkv_bias)
        return total + hidden_size * (query + self.out_bias)

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> int:
        """Count `12 h q + 12 m kv + 12 q s`, for a memory as long as the sequence."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        memory = hidden_size if self.memory_size is None else self.memory_size
        return 12 * (hidden_size * query + memory * key + query * sequence_length)

    def split_sizes(self, tp: int) -> Iterator[tuple[str, int]]:
        """Yield the heads; with fewer key/value heads than ranks, also the size split instead."""
        return split_heads(self.num_heads, self.num_kv_heads, self.head_dim, tp=tp)

    @property
    def token_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_kv_heads

    def cache_shapes(self, batch_size: int, max_length: int, tp: int) -> Mapping[str, Sizes]:
        """Return no shapes: the first pass adds keys and values of its memory's length."""
        del batch_size, max_length, tp
        return {}

    def page_shapes(self, blocks: int, block_size: int, tp: int) -> Mapping[str, Sizes]:
        """Return the shapes of a rank's keys and values of a memory."""
        shape = (blocks, max(1, self.num_kv_heads // tp), block_size, self.head_dim)
        return {"key": shape, "value": shape}

    def context_obstacle(self, algorithm: str, *, cp: int, inner: int, tp: int) -> None:
        """Return None: each rank has the whole memory."""
        del algorithm, cp, inner, tp
