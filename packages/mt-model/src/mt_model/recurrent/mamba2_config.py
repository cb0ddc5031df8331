"""The configuration of the recurrent mixer Mamba-2."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mt_files import Checks, divisors

from mt_model.block.entry import MixerConfig
from mt_model.block.sizes import MAX_HEADS, MAX_LENGTH, Sizes

if TYPE_CHECKING:
    from torch import nn

    from mt_model.block.shard_context import ShardContext
    from mt_model.block.stream import StreamConfig

MAX_TAPS = 64


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(MixerConfig):
    """A selective state space with scalar decays, Mamba-2 (Dao & Gu, 2024).

    Attributes:
        num_heads: heads, each with a decay of its own.
        head_dim: width of one head; `num_heads * head_dim` is commonly twice the hidden size.
        state_size: a head keeps `head_dim * state_size` numbers of what it has seen.
        num_groups: `num_heads // num_groups` consecutive heads share what they write along and
            read along (B and C), and the mean square of their norm.
        conv_size: tokens that the convolution before the state space sees.
        conv_bias: bias of the convolution.
        bias: bias on the projections in and out.
        norm_before_gate: Multiply by the gate after the norm, not before it.
        chunk_size: Number of tokens computed as one matrix; it changes only speed and memory.
        min_dt: smallest step size.
        max_dt: largest step size; None for any.
        init_dt_min: step sizes start from values drawn evenly in their logarithm, from this
        init_dt_max: to this,
        init_dt_floor: and are at least this.
    """

    wide_cache: ClassVar[Collection[str]] = ("state",)  # to which every token adds a little
    hides_padding: ClassVar[bool] = True  # in front of a prompt; elsewhere it is refused

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    conv_size: int = 4
    conv_bias: bool = True
    bias: bool = False
    norm_before_gate: bool = False
    chunk_size: int = 128
    min_dt: float = 0.0
    max_dt: float | None = None
    init_dt_min: float = 0.001
    init_dt_max: float = 0.1
    init_dt_floor: float = 1e-4

    def __post_init__(self) -> None:
        checks = Checks(self)
        sizes = ("num_heads", "head_dim", "state_size", "num_groups")
        checks.at_least(1, *sizes, "conv_size", "chunk_size")
        checks.at_most(MAX_HEADS, *sizes)
        checks.at_most(MAX_TAPS, "conv_size")
        checks.at_most(MAX_LENGTH, "chunk_size")
        checks.at_least(0, "min_dt")
        checks.above(0, "max_dt", "init_dt_min", "init_dt_max", "init_dt_floor")
        checks.done()
        if self.num_heads % self.num_groups:
            near = [d for d in divisors(self.num_heads) if d <= self.num_groups][-1]
            checks.add(
                "num_groups",
                f"{self.num_groups} does not divide num_heads={self.num_heads}: every group has "
                f"the same number of heads. The next smaller that does: {near}.",
            )
        if self.max_dt is not None and self.max_dt < self.min_dt:
            checks.add("max_dt", f"{self.max_dt} is below min_dt={self.min_dt}; swap them.")
        if self.init_dt_max < self.init_dt_min:
            text = f"{self.init_dt_max} is below init_dt_min={self.init_dt_min}; swap them."
            checks.add("init_dt_max", text)
        checks.done()

    @property
    def inner_size(self) -> int:
        """Width of all heads."""
        return self.num_heads * self.head_dim

    def build(self, stream: StreamConfig, *, layer: int, shard: ShardContext) -> nn.Module:
        """Build a `Mamba2`."""
        from mt_model.recurrent.mamba2 import Mamba2

        return Mamba2(self, stream, layer=layer, shard=shard)

    def num_parameters(self, hidden_size: int) -> int:
        """Count projections, convolutions, decays, skips, biases and the norm."""
        inner, shared = self.inner_size, 2 * self.num_groups * self.state_size
        total = (2 * inner + shared + self.num_heads) * (hidden_size + self.bias)
        total += (inner + shared) * (self.conv_size + self.conv_bias)
        total += 3 * self.num_heads + inner
        return total + hidden_size * (inner + self.bias)

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> int:
        """Count `6 h (3 d + 2 g n + heads) + 6 k (d + 2 g n) + 12 d n`, with d of all heads.

        The terms are projections, convolution and the recurrence (a multiply-add each to write
        and to read every number of the state); what computing by chunks costs more is not counted.
        """
        del sequence_length
        inner, shared = self.inner_size, 2 * self.num_groups * self.state_size
        total = 6 * hidden_size * (3 * inner + shared + self.num_heads)
        return total + 6 * self.conv_size * (inner + shared) + 12 * inner * self.state_size

    def split_sizes(self, tp: int) -> Iterator[tuple[str, int]]:
        """Yield the heads; with fewer groups than ranks, also the size split instead."""
        yield "num_heads", self.num_heads
        if tp % self.num_groups:
            yield "num_groups", self.num_groups
        elif self.num_groups < tp:
            yield "state_size", self.state_size

    def cache_shapes(self, batch_size: int, max_length: int, tp: int) -> Mapping[str, Sizes]:
        """Return the shapes of each convolution's last tokens and of the state."""
        del max_length
        heads = self.num_heads // tp
        tail = (batch_size, self.conv_size - 1)
        return {
            "x": (*tail, heads * self.head_dim),
            "bc": (*tail, 2 * self.num_groups * self.state_size // tp),
            "state": (batch_size, heads, self.head_dim, self.state_size),
        }
