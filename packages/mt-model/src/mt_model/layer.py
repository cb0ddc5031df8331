"""One transformer layer: two residual branches, each behind its norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from mt_tensor_parallel import recompute
from torch import Tensor, nn

from mt_model.attend import Pass
from mt_model.config import EntryConfig, LayerConfig, ModelConfig
from mt_model.dropout import DropoutSite
from mt_model.losses import Losses, add_losses, take_losses
from mt_model.norm import build_norm
from mt_model.placement import Placement
from mt_model.recomputation import discard_between

Step: TypeAlias = Callable[[Tensor, Pass], tuple[Tensor, Losses]]
"""A layer, or one of its branches: from the residual stream to the next, with its losses."""


class TransformerLayer(nn.Module):
    """`x + mixer(norm(x))`, then `x + feed_forward(norm(x))` where the layer has one.

    Beside the residual stream it returns what losses its mixer and feed-forward return, by name.

    Args:
        config: the layer's entry in `model.layers`.
        model: hidden size, norms and dropout.
        layer: global index.
        placement: of this rank.

    Shape:
        forward(x): [B, S, hidden] (S / tp tokens under sequence parallelism) -> the same, and
        losses: scalars, sums over these tokens.
    """

    def __init__(
        self, config: LayerConfig, model: ModelConfig, *, layer: int, placement: Placement
    ) -> None:
        super().__init__()
        self.recompute = placement.recompute
        self.group = None if placement.sequence_parallel else placement.group
        self.index, self.config = layer, config

        def branch(name: str, entry: EntryConfig) -> tuple[nn.Module, nn.Module, DropoutSite]:
            norm = build_norm(model.norm, model.hidden_size, dtype=placement.dtype)
            placement.mark_replicated(norm, partial=placement.sequence_parallel)
            site = DropoutSite(model.dropout, seed=placement.seed, layer=layer, name=name)
            return norm, entry.build(model, layer=layer, placement=placement), site

        self.mixer_norm, self.mixer, self.mixer_dropout = branch("mixer", config.mixer)
        self.feed_forward_norm = self.feed_forward = None
        if config.feed_forward is not None:
            self.feed_forward_norm, self.feed_forward, self.feed_forward_dropout = branch(
                "feed_forward", config.feed_forward
            )

    def forward(self, x: Tensor, shared: Pass) -> tuple[Tensor, Losses]:
        """Apply the layer."""
        if self.recompute != "full" or not torch.is_grad_enabled():
            return self._run(x, shared)

        names, memory = list(shared.score_tables), shared.memory
        others = [*shared.score_tables.values(), *([] if memory is None else [memory])]

        def run(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            tables = dict(zip(names, others[: len(names)], strict=True))
            memory = others[-1] if len(others) > len(names) else None
            y, losses = self._run(x, replace(shared, score_tables=tables, memory=memory))
            return y, *losses.values()

        shares = self.group is not None and x.numel() % self.group.size() == 0
        y, *values = recompute(run, x, *others, group=self.group if shares else None)
        return y, dict(zip(self.config.loss_weights, values, strict=True))

    def parts(self) -> list[Step]:
        """The layer in parts, to be applied one after the other; whole where it is run again."""
        if self.recompute == "full":
            return [self]
        return [self._mix] if self.feed_forward is None else [self._mix, self._feed]

    def _run(self, x: Tensor, shared: Pass) -> tuple[Tensor, Losses]:
        x, losses = self._mix(x, shared)
        x, more = self._feed(x, shared)
        return x, add_losses(losses, more)

    def _mix(self, x: Tensor, shared: Pass) -> tuple[Tensor, Losses]:
        mixer = partial(self.mixer, shared=shared)
        mixed, losses = self._behind(self.mixer_norm, mixer, x, self.config.mixer)
        return x + self.mixer_dropout(mixed, shared.hidden_index), losses

    def _feed(self, x: Tensor, shared: Pass) -> tuple[Tensor, Losses]:
        norm, feed_forward = self.feed_forward_norm, self.feed_forward
        entry = self.config.feed_forward
        if norm is None or feed_forward is None or entry is None:
            return x, {}
        fed, losses = self._behind(norm, feed_forward, x, entry)
        return x + self.feed_forward_dropout(fed, shared.hidden_index), losses

    def _behind(
        self, norm: nn.Module, branch: Callable[[Tensor], Any], x: Tensor, entry: EntryConfig
    ) -> tuple[Tensor, Losses]:
        if self.recompute == "selective":
            output = discard_between(norm, branch, x)
        else:
            output = branch(norm(x))
        of = f"the {type(entry).__name__} of layer {self.index}"
        return take_losses(output, entry.loss_weights, of=of)
