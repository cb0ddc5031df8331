"""One transformer layer: two residual branches, each behind its norm."""

from __future__ import annotations

from torch import Tensor, nn

from mt_model.attention import Attention
from mt_model.config import LayerConfig, ModelConfig
from mt_model.dropout import DropoutSite
from mt_model.mlp import MLP
from mt_model.norm import build_norm
from mt_model.placement import Pass, Placement


class TransformerLayer(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))` where the layer has a feed-forward.

    Args:
        config: the layer's entry in `model.layers`.
        model: hidden size, norms and dropout.
        layer: global index.
        placement: of this rank.

    Shape:
        forward(x): [B, S, hidden] (S / tp tokens under sequence parallelism) -> the same.
    """

    def __init__(
        self, config: LayerConfig, model: ModelConfig, *, layer: int, placement: Placement
    ) -> None:
        super().__init__()
        size, where = model.hidden_size, {"dtype": placement.dtype, "device": placement.device}
        self.attention_norm = build_norm(model.norm, size, **where)
        self.attention = Attention(
            config.mixer, size, norm_eps=model.norm.eps, layer=layer, placement=placement
        )
        norms = [self.attention_norm]
        self.mlp_norm = self.mlp = None
        if config.feed_forward is not None:
            self.mlp_norm = build_norm(model.norm, size, **where)
            self.mlp = MLP(config.feed_forward, size, placement=placement)
            norms.append(self.mlp_norm)
        for norm in norms:
            placement.mark_replicated(norm, partial=placement.sequence_parallel)
        self.mixer_dropout, self.feed_forward_dropout = (
            DropoutSite.at(model.dropout, seed=placement.seed, layer=layer, name=name)
            for name in ("mixer", "feed_forward")
        )

    def forward(self, x: Tensor, shared: Pass, *, layer: int) -> Tensor:
        """Apply the layer; `layer` is the index in the stage, for the cache."""
        mixed = self.attention(self.attention_norm(x), shared, layer=layer)
        x = x + self.mixer_dropout(mixed, shared.hidden_index)
        if self.mlp is None or self.mlp_norm is None:
            return x
        return x + self.feed_forward_dropout(self.mlp(self.mlp_norm(x)), shared.hidden_index)
