"""One transformer layer: two residual branches, each behind its norm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from mt_tensor_parallel import recompute
from torch import Tensor, nn

from mt_model.attend import Pass
from mt_model.config import EntryConfig, LayerConfig, ModelConfig
from mt_model.dropout import DropoutSite
from mt_model.norm import build_norm
from mt_model.placement import Placement
from mt_model.recomputation import discard_between


class TransformerLayer(nn.Module):
    """`x + mixer(norm(x))`, then `x + feed_forward(norm(x))` where the layer has one.

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

        def branch(name: str, entry: EntryConfig) -> tuple[nn.Module, nn.Module, DropoutSite]:
            norm = build_norm(model.norm, model.hidden_size, dtype=placement.dtype)
            placement.mark_replicated(norm, partial=placement.sequence_parallel)
            site = DropoutSite.at(model.dropout, seed=placement.seed, layer=layer, name=name)
            return norm, entry.build(model, layer=layer, placement=placement), site

        self.mixer_norm, self.mixer, self.mixer_dropout = branch("mixer", config.mixer)
        self.feed_forward_norm = self.feed_forward = None
        if config.feed_forward is not None:
            self.feed_forward_norm, self.feed_forward, self.feed_forward_dropout = branch(
                "feed_forward", config.feed_forward
            )

    def forward(self, x: Tensor, shared: Pass) -> Tensor:
        """Apply the layer."""
        if self.recompute != "full" or not torch.is_grad_enabled():
            return self._run(x, shared)
        shares = self.group is not None and x.numel() % self.group.size() == 0
        return recompute(partial(self._run, shared=shared), x, group=self.group if shares else None)

    def _run(self, x: Tensor, shared: Pass) -> Tensor:
        mixed = self._behind(self.mixer_norm, partial(self.mixer, shared=shared), x)
        x = x + self.mixer_dropout(mixed, shared.hidden_index)
        if self.feed_forward is None or self.feed_forward_norm is None:
            return x
        fed = self._behind(self.feed_forward_norm, self.feed_forward, x)
        return x + self.feed_forward_dropout(fed, shared.hidden_index)

    def _behind(self, norm: nn.Module, branch: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.recompute != "selective":
            return branch(norm(x))
        return discard_between(norm, branch, x)
