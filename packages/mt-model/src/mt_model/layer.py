"""One transformer layer: branches of the residual stream, with their norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from mt_model.attend import Pass
from mt_model.dropout import DropoutSite
from mt_model.losses import Losses, add_losses, take_losses
from mt_model.norm import stream_norm
from mt_model.placement import Placement
from mt_model.recomputation import discard_between_all, made_again, make_again
from mt_model.recompute_plan import WORDS
from mt_model.stack_config import LayerConfig, StackConfig

Step: TypeAlias = Callable[[Tensor, Pass], tuple[Tensor, Losses]]
"""A layer, or one of its branches: from the residual stream to the next, with its losses."""
Wrap: TypeAlias = Callable[[Step], Step]
"""What makes a function of a layer that takes the place of it, such as `torch.compile`."""
Output: TypeAlias = Any  # of a mixer or feed-forward: a tensor, or that and losses


class TransformerLayer(nn.Module):
    """A mixer and a feed-forward, or one of them, each a branch as `LayerConfig` describes.

    Beside the residual stream it returns what losses its mixer and feed-forward return, by name.
    Norms in front of a branch are `mixer_norm` and `feed_forward_norm`, those behind one
    `mixer_output_norm` and `feed_forward_output_norm`; what a layer does not have is None.

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
        self, config: LayerConfig, model: StackConfig, *, layer: int, placement: Placement
    ) -> None:
        super().__init__()
        self.made_again, self.offloads = placement.made_again, placement.offloads
        self.group = None if placement.sequence_parallel else placement.group
        self.index, self.config = layer, config
        self._wrapped: dict[str, Step] = {}

        def norm(*, there: bool) -> nn.Module | None:
            return stream_norm(model, placement) if there else None

        def dropout(name: str) -> DropoutSite:
            return DropoutSite(model.dropout, seed=placement.seed, layer=layer, name=name)

        before, after = config.norms in ("pre", "sandwich"), config.norms != "pre"
        has_first, has_second = config.mixer is not None, config.feed_forward is not None
        self.mixer_norm = norm(there=before and has_first)
        self.mixer = None
        if config.mixer is not None:
            self.mixer = config.mixer.build(model, layer=layer, placement=placement)
        self.mixer_output_norm = norm(there=after and has_first)
        self.mixer_dropout = dropout("mixer")
        self.feed_forward_norm = norm(there=before and has_second and not config.shared_norm)
        self.feed_forward = None
        if config.feed_forward is not None:
            self.feed_forward = config.feed_forward.build(model, layer=layer, placement=placement)
        self.feed_forward_output_norm = norm(there=after and has_second)
        self.feed_forward_dropout = dropout("feed_forward")
        # Made here, as an index that is read in a compiled graph makes it one layer's own.
        entries = (config.mixer, config.feed_forward)
        self._whose = [f"the {type(entry).__name__} of layer {layer}" for entry in entries]
        self.patterns = make_again(self, self.made_again.difference(WORDS))
        if hasattr(self.mixer, "again"):
            self.patterns.add("attention")

    def forward(self, x: Tensor, shared: Pass) -> tuple[Tensor, Losses]:
        """Apply the layer."""
        if shared.saved is None or not torch.is_grad_enabled():
            return self._whole(x, shared)
        with shared.saved.of_layer(self.index, others=self._others(shared)):
            return self._whole(x, shared)

    def wrap(self, wrap: Wrap | None) -> None:
        """Have what the layer computes called through `wrap`, but for passes that are plain.

        Hooks of the layer, offloading, and `made_again` of the whole layer stay outside of what
        is wrapped. `wrap` is given the whole, and each part of it that `parts` has; None ends it.
        """
        steps = (self._run, self._mix, self._feed, self._both)
        self._wrapped = {} if wrap is None else {step.__name__: wrap(step) for step in steps}

    def _outer(self, step: Step) -> Step:
        return self._wrapped.get(step.__name__, step)

    def _others(self, shared: Pass) -> Iterator[Tensor]:
        """What the layer reads, but is not made by it."""
        yield from self.parameters()
        yield from shared.score_tables.values()
        yield from (table.values for table in shared.tables.values())
        once = (shared.documents, shared.hidden_index, shared.memory, shared.memory_mask)
        yield from (x for x in once if x is not None)

    def _whole(self, x: Tensor, shared: Pass) -> tuple[Tensor, Losses]:
        shares = self.group is not None and x.numel() % self.group.size() == 0
        return made_again(
            self._run if shared.plain else self._outer(self._run),
            x,
            shared=shared,
            group=self.group if shares else None,
            when="layer" in self.made_again,
        )

    def parts(self) -> list[Step]:
        """The layer in parts, to be applied one after the other.

        One part where it is run again as a whole, and where both branches have the same input.
        """
        if "layer" in self.made_again or self.offloads:
            return [self]
        if self.config.parallel:
            return [self._outer(self._both)]
        both = ((self.mixer, self._mix), (self.feed_forward, self._feed))
        return [self._outer(step) for branch, step in both if branch is not None]

    def _run(self, x: Tensor, shared: Pass) -> tuple[Tensor, Losses]:
        if self.config.parallel:
            return self._both(x, shared)
        x, losses = self._mix(x, shared)
        x, more = self._feed(x, shared)
        return x, add_losses(losses, more)

    def _mix(self, x: Tensor, shared: Pass) -> tuple[Tensor, Losses]:
        mixer, entry = self.mixer, self.config.mixer
        if mixer is None or entry is None:
            return x, {}
        (output,) = self._behind(self.mixer_norm, [partial(mixer, shared=shared)], x)
        mixed, losses = take_losses(output, entry.loss_weights, of=self._whose[0])
        return self._add_mixed(x, mixed, shared), losses

    def _feed(self, x: Tensor, shared: Pass) -> tuple[Tensor, Losses]:
        feed_forward, entry = self.feed_forward, self.config.feed_forward
        if feed_forward is None or entry is None:
            return x, {}
        feed = partial(feed_forward, shared=shared) if entry.drops else feed_forward
        (output,) = self._behind(self.feed_forward_norm, [feed], x)
        fed, losses = take_losses(output, entry.loss_weights, of=self._whose[1])
        return self._add_fed(x, fed, shared), losses

    def _both(self, x: Tensor, shared: Pass) -> tuple[Tensor, Losses]:
        mixer, first = self.mixer, self.config.mixer
        feed_forward, entry = self.feed_forward, self.config.feed_forward
        if mixer is None or first is None:
            return self._feed(x, shared)
        if feed_forward is None or entry is None:
            return self._mix(x, shared)
        mix = partial(mixer, shared=shared)
        feed = partial(feed_forward, shared=shared) if entry.drops else feed_forward
        if self.config.shared_norm:
            outputs = self._behind(self.mixer_norm, [mix, feed], x)
        else:
            outputs = self._behind(self.mixer_norm, [mix], x)
            outputs += self._behind(self.feed_forward_norm, [feed], x)
        mixed, losses = take_losses(outputs[0], first.loss_weights, of=self._whose[0])
        fed, more = take_losses(outputs[1], entry.loss_weights, of=self._whose[1])
        x = self._add_fed(self._add_mixed(x, mixed, shared), fed, shared)
        return x, add_losses(losses, more)

    def _behind(
        self, norm: nn.Module | None, branches: list[Callable[[Tensor], Output]], x: Tensor
    ) -> list[Output]:
        """Outputs of the branches behind their norm, which selective recomputation discards."""
        if norm is not None and "norm" in self.made_again:
            return discard_between_all(norm, branches, x)
        normed = x if norm is None else norm(x)
        return [branch(normed) for branch in branches]

    def _add_mixed(self, x: Tensor, mixed: Tensor, shared: Pass) -> Tensor:
        return self._add(x, mixed, self.mixer_output_norm, self.mixer_dropout, shared)

    def _add_fed(self, x: Tensor, fed: Tensor, shared: Pass) -> Tensor:
        return self._add(x, fed, self.feed_forward_output_norm, self.feed_forward_dropout, shared)

    def _add(
        self, x: Tensor, y: Tensor, norm: nn.Module | None, dropout: DropoutSite, shared: Pass
    ) -> Tensor:
        """Add a branch's output to the stream, with the norm behind the branch or the sum."""
        scale, is_post = self.config.residual_scale, self.config.norms == "post"
        if norm is not None and not is_post:
            y = norm(y)
        y = dropout(y, shared.hidden_index)
        x = x + y if scale == 1 else torch.add(x, y, alpha=scale)
        return norm(x) if norm is not None and is_post else x
