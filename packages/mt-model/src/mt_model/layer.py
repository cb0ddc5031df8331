"""One transformer layer: two residual branches, each behind its norm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from mt_tensor_parallel import recompute
from torch import Tensor, nn

from mt_model.attention import Attention
from mt_model.config import LayerConfig, ModelConfig
from mt_model.dropout import DropoutSite
from mt_model.mlp import MLP
from mt_model.norm import build_norm
from mt_model.placement import Pass, Placement
from mt_model.recomputation import discard_between


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
        self.recompute = placement.recompute
        self.group = None if placement.sequence_parallel else placement.group
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
        if self.recompute != "full" or not torch.is_grad_enabled():
            return self._run(x, shared, layer=layer)
        shares = self.group is not None and x.numel() % self.group.size() == 0
        return recompute(
            partial(self._run, shared=shared, layer=layer),
            x,
            group=self.group if shares else None,
        )

    def _run(self, x: Tensor, shared: Pass, *, layer: int) -> Tensor:
        attention = partial(self.attention, shared=shared, layer=layer)
        mixed = self._behind(self.attention_norm, attention, x)
        x = x + self.mixer_dropout(mixed, shared.hidden_index)
        if self.mlp is None or self.mlp_norm is None:
            return x
        fed = self._behind(self.mlp_norm, self.mlp, x)
        return x + self.feed_forward_dropout(fed, shared.hidden_index)

    def _behind(self, norm: nn.Module, branch: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.recompute != "selective":
            return branch(norm(x))
        return discard_between(norm, branch, x)
