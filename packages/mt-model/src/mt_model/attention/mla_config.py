"""Multi-head latent attention, as a frozen value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

from mt_files import Checks

from mt_model.attention.config import heads_obstacle, twice_seen
from mt_model.block.entry import MixerConfig
from mt_model.block.sizes import MAX_HEADS, MAX_LENGTH, MAX_WIDTH, Sizes
from mt_model.rope.config import RopeConfig, Rotary
from mt_model.rope.scaling import YarnScaling

if TYPE_CHECKING:
    from torch import nn

    from mt_model.block.shard_context import ShardContext
    from mt_model.block.stream import StreamConfig


@dataclass(frozen=True, kw_only=True)
class MLAConfig(MixerConfig):
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values come from a narrow latent.

    A head's query and key have a part without and a part with rotation; the key's turning part is
    the same for all heads. A cache keeps the latent and the turning part.

    Attributes:
        num_heads: Number of heads of queries, keys and values.
        kv_lora_rank: Width of the latent of keys and values.
        nope_head_dim: Number of channels of a query and key without rotation.
        rope_head_dim: Number of channels with rotation.
        v_head_dim: Width of a value.
        q_lora_rank: Width of a latent of the queries; None for a single projection.
        rope: Rotary embedding of the turning channels; None for none.
        down_bias: Bias of the projections to the latents.
        out_bias: Bias of the output projection.
        norm_eps: Eps of the norms of the latents; the model's norm eps where None.
        dropout: Probability of dropping an attention weight in training.
        window: Number of tokens that a query sees, the last of which is itself; None for all.
        scale: Scale of the scores; `(nope_head_dim + rope_head_dim) ** -0.5` where None.
    """

    token_cache: ClassVar[Mapping[str, Literal["key", "value"]]] = MappingProxyType(
        {"latent": "key", "turned": "key"}
    )
    hides_padding: ClassVar[bool] = True

    num_heads: int
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope: RopeConfig | None = None
    down_bias: bool = False
    out_bias: bool = False
    norm_eps: float | None = None
    dropout: float = 0.0
    window: int | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        heads = ("num_heads", "nope_head_dim", "rope_head_dim", "v_head_dim")
        checks.at_least(1, *heads, "kv_lora_rank", "q_lora_rank", "window")
        checks.at_most(MAX_HEADS, *heads)
        checks.at_most(MAX_WIDTH, "kv_lora_rank", "q_lora_rank")
        checks.at_most(MAX_LENGTH, "window")
        checks.fraction("dropout")
        checks.above(0, "scale", "norm_eps")
        checks.done()
        why = None if self.rope is None else self.rope.obstacle(self.rope_head_dim)
        if why is not None:
            checks.add("rope_head_dim", f"{why}. Use another rope_head_dim, or rope: null.")
        checks.done()

    @property
    def head_dim(self) -> int:
        """Number of channels of a query."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def rotary(self) -> Rotary | None:
        """The rotary embedding and head size of the table that it reads."""
        return None if self.rope is None else Rotary(self.rope, self.rope_head_dim)

    def build(self, stream: StreamConfig, *, layer: int, shard: ShardContext) -> nn.Module:
        """Build a `LatentAttention`."""
        from mt_model.attention.mla import LatentAttention

        return LatentAttention(self, stream, layer=layer, shard=shard)

    def _matrices(self, hidden_size: int) -> int:
        """Count the elements of all weight matrices."""
        query, rank = self.num_heads * self.head_dim, self.q_lora_rank
        total = hidden_size * query if rank is None else rank * (hidden_size + query)
        total += hidden_size * (self.kv_lora_rank + self.rope_head_dim)
        total += self.num_heads * self.kv_lora_rank * (self.nope_head_dim + self.v_head_dim)
        return total + hidden_size * self.num_heads * self.v_head_dim

    def num_parameters(self, hidden_size: int) -> int:
        """Count weights, biases and norms."""
        latents = self.kv_lora_rank + (self.q_lora_rank or 0)
        biases = (latents + self.rope_head_dim) * self.down_bias + hidden_size * self.out_bias
        return self._matrices(hidden_size) + biases + latents

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> int:
        """Count 6 for each weight, and the products with visible keys and values."""
        both = self.num_heads * (self.head_dim + self.v_head_dim)
        seen = twice_seen(self.window, sequence_length)
        return 6 * self._matrices(hidden_size) + 3 * both * seen

    def split_sizes(self, tp: int) -> Iterator[tuple[str, int]]:
        """Yield the heads."""
        del tp
        yield "num_heads", self.num_heads

    @property
    def token_heads(self) -> int:
        """Return 1: all query heads share the latent."""
        return 1

    def cache_shapes(self, batch_size: int, max_length: int, tp: int) -> Mapping[str, Sizes]:
        """Return the shapes of the latents and the keys' turning part, whole on each rank."""
        del tp
        sizes = {"latent": self.kv_lora_rank, "turned": self.rope_head_dim}
        return {name: (batch_size, 1, max_length, size) for name, size in sizes.items()}

    def context_obstacle(self, algorithm: str, *, cp: int, inner: int, tp: int) -> str | None:
        """Return why ranks that swap tokens for heads can't share the heads."""
        ranks = {"ulysses": cp, "hierarchical": inner}.get(algorithm, 1)
        heads = self.num_heads // tp
        return heads_obstacle(algorithm, heads=heads, groups=heads, ranks=ranks)


def score_scale(head_dim: int, rope: RopeConfig) -> float | None:
    """Return the scale of scores that YaRN's `mscale_all_dim` asks for; None for the usual."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim:
        return None
    return head_dim**-0.5 * scaling.score_factor
