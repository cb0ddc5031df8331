"""The gated delta net, a recurrent mixer, as a frozen value."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mt_files import Checks, divisors

from mt_model.block.entry import MixerConfig
from mt_model.block.sizes import MAX_HEADS, MAX_LENGTH, Sizes
from mt_model.recurrent.mamba2_config import MAX_TAPS

if TYPE_CHECKING:
    from torch import nn

    from mt_model.block.shard_context import ShardContext
    from mt_model.block.stream import StreamConfig


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(MixerConfig):
    """Linear attention by the gated delta rule (Yang et al., 2024), as Qwen3-Next has it.

    Attributes:
        num_key_heads: query and key heads.
        num_value_heads: value heads, each with a decay of its own; as many as there are key heads,
            or a multiple: `num_value_heads // num_key_heads` consecutive ones share a key head.
        key_dim: width of a query or key head.
        value_dim: width of a value head; it keeps `key_dim * value_dim` numbers of what it has
            seen.
        conv_size: tokens that the convolution of queries, keys and values sees.
        chunk_size: Number of tokens computed as one matrix; it changes only speed and memory.
    """

    wide_cache: ClassVar[Collection[str]] = ("state",)  # to which every token adds a little
    hides_padding: ClassVar[bool] = True  # in front of a prompt; elsewhere it is refused

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int = 4
    chunk_size: int = 64

    def __post_init__(self) -> None:
        checks = Checks(self)
        sizes = ("num_key_heads", "num_value_heads", "key_dim", "value_dim")
        checks.at_least(1, *sizes, "conv_size", "chunk_size")
        checks.at_most(MAX_HEADS, *sizes)
        checks.at_most(MAX_TAPS, "conv_size")
        checks.at_most(MAX_LENGTH, "chunk_size")
        checks.done()
        if self.num_value_heads % self.num_key_heads:
            smaller = [d for d in divisors(self.num_value_heads) if d <= self.num_key_heads][-1]
            checks.add(
                "num_key_heads",
                f"{self.num_key_heads} does not divide num_value_heads={self.num_value_heads}: "
                "every key head serves the same number of value heads. The next smaller that "
                f"does: {smaller}.",
            )
        checks.done()

    @property
    def values_per_key(self) -> int:
        """Value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Widths of the query, the key, the values and the gates of one key head."""
        values = self.values_per_key * self.value_dim
        return self.key_dim, self.key_dim, values, values

    def build(self, stream: StreamConfig, *, layer: int, shard: ShardContext) -> nn.Module:
        """Build a `GatedDeltaNet`."""
        from mt_model.recurrent.gated_delta_net import GatedDeltaNet

        return GatedDeltaNet(self, stream, layer=layer, shard=shard)

    def num_parameters(self, hidden_size: int) -> int:
        """Count projections, convolution, decays and the norm."""
        qkv, gates = sum(self.parts[:3]), self.parts[3]
        each = (qkv + gates + 2 * self.values_per_key) * hidden_size + qkv * self.conv_size
        values = self.num_value_heads * (2 + self.value_dim * hidden_size)
        return self.num_key_heads * each + values + self.value_dim

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> int:
        """Count `6 h (2 k + 3 v + 2 heads) + 6 c (2 k + v) + 18 v d`.

        With k and v of all key and value heads, c of the convolution, d of one key: projections,
        convolution and the recurrence itself (a multiply-add each to look up, to write and to read
        every number of the state); what computing by chunks costs more is not counted.
        """
        del sequence_length
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        total = 6 * hidden_size * (2 * keys + 3 * values + 2 * self.num_value_heads)
        return total + 6 * self.conv_size * (2 * keys + values) + 18 * values * self.key_dim

    def split_sizes(self, tp: int) -> Iterator[tuple[str, int]]:
        """Give the key heads, with which everything else is split."""
        del tp
        yield "num_key_heads", self.num_key_heads

    def cache_shapes(self, batch_size: int, max_length: int, tp: int) -> Mapping[str, Sizes]:
        """Return the shapes of the convolution's last tokens and of the state."""
        del max_length
        keys, values = self.num_key_heads // tp, self.num_value_heads // tp
        return {
            "qkv": (batch_size, self.conv_size - 1, keys * sum(self.parts[:3])),
            "state": (batch_size, values, self.key_dim, self.value_dim),
        }
