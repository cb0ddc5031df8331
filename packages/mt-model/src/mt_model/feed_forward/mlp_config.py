"""A feed-forward of two projections, as a frozen value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mt_files import Checks

from mt_model.block.entry import FeedForwardConfig
from mt_model.block.sizes import MAX_CLAMP, MAX_WIDTH
from mt_model.kernels.words import Activation

if TYPE_CHECKING:
    from torch import nn

    from mt_model.block.shard_context import ShardContext
    from mt_model.block.stream import StreamConfig


@dataclass(frozen=True, kw_only=True)
class MLPConfig(FeedForwardConfig):
    """Two projections with an activation between: `down(act(up x))`, or gated `act(g x) * up x`.

    Attributes:
        ffn_size: width between the projections.
        activation: `silu`, `gelu` (exact, erf), `gelu_tanh` (GPT-2's), `gelu_quick`
            (`x sigmoid(1.702 x)`, CLIP's), `relu` or `relu2` (squared ReLU).
        gated: multiply the activation by a second projection (SwiGLU with `silu`).
        bias: bias on both projections.
        clamp: gated only: `g x` is cut to at most this, and `up x` to its size (GPT-OSS: 7).
        up_offset: gated only: it is `act(g x) * (up x + up_offset)` (GPT-OSS: 1).
        dropout: probability of dropping an element between the projections (T5).
    """

    ffn_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    clamp: float | None = None
    up_offset: float = 0.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "ffn_size")
        checks.at_most(MAX_WIDTH, "ffn_size")
        checks.above(0, "clamp")
        checks.at_most(MAX_CLAMP, "clamp")
        checks.fraction("dropout")
        checks.done()
        for name in ("clamp", "up_offset"):
            if not self.gated and getattr(self, name):
                text = f"{getattr(self, name)}, which a plain feed-forward does not have. Use "
                checks.add(name, text + "gated=True, or leave it out.")
        checks.done()

    def build(self, stream: StreamConfig, *, layer: int, shard: ShardContext) -> nn.Module:
        """Build an `MLP`."""
        from mt_model.feed_forward.mlp import MLP

        return MLP(self, stream, layer=layer, shard=shard)

    def num_parameters(self, hidden_size: int) -> int:
        """Count weights and biases."""
        up = self.ffn_size * (2 if self.gated else 1)
        return up * (hidden_size + self.bias) + hidden_size * (self.ffn_size + self.bias)

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> int:
        """Count `6 h e ffn` with e = 3 gated, else 2."""
        del sequence_length
        return 6 * hidden_size * (3 if self.gated else 2) * self.ffn_size

    def split_sizes(self, tp: int) -> Iterator[tuple[str, int]]:
        """Give the width between the projections."""
        del tp
        yield "ffn_size", self.ffn_size
