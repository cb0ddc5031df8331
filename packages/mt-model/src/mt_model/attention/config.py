"""Softmax attention, as a frozen value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

from mt_files import Checks, divisors

from mt_model.attend.score_bias import ScoreBias
from mt_model.block.entry import MixerConfig
from mt_model.block.sizes import MAX_HEADS, MAX_LENGTH, Sizes
from mt_model.kernels.words import QKNorm, Sinks
from mt_model.rope.config import RopeConfig, Rotary
from mt_model.rope.temperature import TemperatureConfig

if TYPE_CHECKING:
    from torch import nn

    from mt_model.block.shard_context import ShardContext
    from mt_model.block.stream import StreamConfig


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(MixerConfig):
    """Softmax attention; `num_kv_heads < num_heads` is grouped-query attention.

    Attributes:
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; each serves `num_heads // num_kv_heads` query
            heads.
        head_dim: Width of one head; `num_heads * head_dim` need not be the hidden size.
        rope: Rotary embedding of queries and keys; None for none (NoPE).
        qk_norm: RMSNorm of queries and keys: `head`, over each head before the rotation; `whole`,
            over all heads of a token together, before the rotation too; `l2`, over each head
            without a weight, after the rotation; or `none`.
        qkv_bias: Bias of the fused query, key and value projection.
        out_bias: Bias of the output projection.
        output_gate: The output is multiplied by the sigmoid of a gate for each channel of each
            query head, which the fused projection makes too.
        causal: A query sees the tokens up to its own; False: all of them.
        dropout: Probability of dropping an attention weight in training.
        window: Number of tokens that a query sees, the last of which is itself, and as many on the
            other side where attention is not causal; None for all.
        chunk: Number of tokens of the chunks that a document is cut into; a query sees its own
            chunk only (Llama 4). None for no chunks.
        temperature: Factors of queries by position, after the rotation; None for none.
        sinks: One more logit per query head in the softmax, without a value: `learned`, or `zero`
            (softmax off by one); or `none`.
        softcap: Scores become `softcap * tanh(score / softcap)`; None leaves them.
        scale: Scale of the scores; `head_dim ** -0.5` where None.
        score_bias: Bias of the scores by distance, after a soft cap: `alibi` or `relative` (T5).
    """

    token_cache: ClassVar[Mapping[str, Literal["key", "value"]]] = MappingProxyType(
        {"key": "key", "value": "value"}
    )
    hides_padding: ClassVar[bool] = True

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None = None
    qk_norm: QKNorm = "none"
    qkv_bias: bool = False
    out_bias: bool = False
    output_gate: bool = False
    causal: bool = True
    dropout: float = 0.0
    window: int | None = None
    chunk: int | None = None
    temperature: TemperatureConfig | None = None
    sinks: Sinks = "none"
    softcap: float | None = None
    scale: float | None = None
    score_bias: ScoreBias | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        sizes = ("num_heads", "num_kv_heads", "head_dim")
        checks.at_least(1, *sizes, "window", "chunk")
        checks.at_most(MAX_HEADS, *sizes)
        checks.at_most(MAX_LENGTH, "window", "chunk")
        checks.fraction("dropout")
        checks.above(0, "softcap", "scale")
        checks.done()
        check_groups(checks, self.num_heads, self.num_kv_heads)
        if self.chunk is not None and self.window is not None:
            text = f"{self.chunk} does not go with window={self.window}; use one of them"
            checks.add("chunk", text)
        why = None if self.rope is None else self.rope.obstacle(self.head_dim)
        if why is not None:
            checks.add(
                "head_dim",
                f"{why}. Use another head_dim or rope.fraction, or no RoPE (gpt's positions is "
                "'learned' or 'none').",
            )
        checks.done()

    @property
    def queries_per_group(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rotary(self) -> Rotary | None:
        """The rotary embedding and head size of the table that it reads."""
        return None if self.rope is None else Rotary(self.rope, self.head_dim)

    @property
    def query_temperature(self) -> TemperatureConfig | None:
        """Factors of queries by their positions."""
        return self.temperature

    @property
    def shared_table(self) -> tuple[str, int, int] | None:
        """Name, buckets and heads of the bias table that it shares with other layers."""
        if self.score_bias is None or self.score_bias.shared_table is None:
            return None
        return self.score_bias.shared_table, self.score_bias.num_buckets, self.num_heads

    @property
    def own_buckets(self) -> int:
        """Number of rows of the layer's own bias table."""
        if self.score_bias is None or self.score_bias.shared_table is not None:
            return 0
        return self.score_bias.num_buckets

    @property
    def is_causal(self) -> bool:
        """Whether a token sees no later token."""
        return self.causal

    @property
    def clipped_heads(self) -> int:
        """Number of key heads, unless a norm makes the scores independent of the weights."""
        return self.num_kv_heads if self.qk_norm == "none" else 0

    def build(self, stream: StreamConfig, *, layer: int, shard: ShardContext) -> nn.Module:
        """Build an `Attention`."""
        from mt_model.attention.attention import Attention

        return Attention(self, stream, layer=layer, shard=shard)

    def num_parameters(self, hidden_size: int) -> int:
        """Count weights, biases, norms, sinks and a table of its own."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rows = query * (1 + self.output_gate) + 2 * key
        norms = {"head": 2 * self.head_dim, "whole": query + key}.get(self.qk_norm, 0)
        total = rows * (hidden_size + self.qkv_bias) + hidden_size * (query + self.out_bias)
        return total + norms + self.num_heads * ((self.sinks == "learned") + self.own_buckets)

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> int:
        """Count `6 h (q + 2 kv) + 6 q h`, a gate's, and the products with the keys seen."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rows = query * (2 + self.output_gate) + 2 * key
        whole = sequence_length if self.chunk is None else min(self.chunk, sequence_length)
        seen = twice_seen(self.window, whole) * (1 if self.causal else 2)
        return 6 * hidden_size * rows + 6 * query * seen

    def split_sizes(self, tp: int) -> Iterator[tuple[str, int]]:
        """Yield the heads; with fewer key/value heads than ranks, also the size split instead."""
        return split_heads(self.num_heads, self.num_kv_heads, self.head_dim, tp=tp)

    @property
    def token_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_kv_heads

    def cache_shapes(self, batch_size: int, max_length: int, tp: int) -> Mapping[str, Sizes]:
        """Return the shapes of a rank's keys and values."""
        if not self.causal:
            raise NotImplementedError(
                "attention that is not causal sees tokens yet to come; it can't generate. Call the "
                "model without a cache, or use causal=True"
            )
        shape = (batch_size, max(1, self.num_kv_heads // tp), max_length, self.head_dim)
        return {"key": shape, "value": shape}

    def context_obstacle(self, algorithm: str, *, cp: int, inner: int, tp: int) -> str | None:
        """Return why ranks that swap tokens for heads can't share the heads."""
        ranks = {"ulysses": cp, "hierarchical": inner}.get(algorithm, 1)
        groups = max(1, self.num_kv_heads // tp)
        return heads_obstacle(algorithm, heads=self.num_heads // tp, groups=groups, ranks=ranks)


def check_groups(checks: Checks, num_heads: int, num_kv_heads: int) -> None:
    """Check that every key/value head serves the same number of query heads."""
    if num_heads % num_kv_heads:
        good = _around(num_kv_heads, divisors(num_heads))
        checks.add(
            "num_heads",
            f"{num_heads} is not a multiple of num_kv_heads={num_kv_heads}: every key/value head "
            f"serves the same number of query heads. Nearest num_kv_heads that does: {good}.",
        )


def split_heads(
    num_heads: int, num_kv_heads: int, head_dim: int, *, tp: int
) -> Iterator[tuple[str, int]]:
    """Yield the sizes that `tp` ranks have to divide to share the heads."""
    yield "num_heads", num_heads
    if tp % num_kv_heads:
        yield "num_kv_heads", num_kv_heads
    elif num_kv_heads < tp:
        yield "head_dim", head_dim


def heads_obstacle(algorithm: str, *, heads: int, groups: int, ranks: int) -> str | None:
    """Return why ranks that swap tokens for heads can't share a tp rank's heads."""
    if heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0):
        return None
    return (
        f"{algorithm} shares {heads} heads and {groups} key/value heads per tp rank out to "
        f"{ranks} ranks, and they do not divide; use ring or all_gather"
    )


def twice_seen(window: int | None, length: int) -> int:
    """Return twice the tokens that a causal query sees on average."""
    window = min(window or length, length)
    return 2 * window - window * window // length


def _around(value: int, allowed: list[int]) -> str:
    """Name the allowed values on both sides of a value."""
    around = [v for v in allowed if v < value][-1:] + [v for v in allowed if v > value][:1]
    return " or ".join(map(str, around))
