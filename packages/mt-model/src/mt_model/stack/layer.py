"""One transformer layer: branches of the residual stream, with their norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch
from mt_fusions import RESIDUAL
from mt_kernels import Choice, Selector
from torch import Tensor, nn

from mt_model.attend.context import ForwardContext
from mt_model.block.dropout import DropoutSite
from mt_model.block.losses import Losses, add_losses, take_losses
from mt_model.block.norm import stream_norm
from mt_model.block.recomputation import (
    discard_between_all,
    is_recomputed,
    recompute_modules,
    recomputed,
)
from mt_model.block.residual import Stream, added, apart, normed
from mt_model.block.shard_context import ShardContext
from mt_model.block.shared_input import SharesInputs, behind_norm
from mt_model.recompute.plan import WORDS
from mt_model.stack.config import StackConfig
from mt_model.stack.layer_config import LayerConfig

if TYPE_CHECKING:
    from mt_quant import SharedInput
    from mt_tensor_parallel import LoraAdapter

Step: TypeAlias = Callable[[Any, ForwardContext], tuple[Any, Losses]]
"""A layer, or one of its branches: from the residual stream to the next, with its losses."""
Wrap: TypeAlias = Callable[[Step], Step]
"""What makes a function of a layer that takes the place of it, such as `torch.compile`."""
Output: TypeAlias = Any  # of a mixer or feed-forward: a tensor, or that and losses


@runtime_checkable
class InParts(Protocol):
    """A feed-forward whose work has parts with communication between, such as experts'."""

    def parts(self) -> Sequence[Callable[..., Any]]:
        """Return functions that, called one after the other, do what the module does.

        The first takes the module's input, each other the output of the one before, and the last
        returns the module's output. Gradients flow only through these values, nests of tensors
        (`mt_pipeline.SplitStage`).
        """
        ...


class TransformerLayer(nn.Module):
    """A mixer and a feed-forward, or one of them, each a branch as `LayerConfig` describes.

    Besides the residual stream it returns the losses of its mixer and feed-forward, by name. The
    norms before a branch are `mixer_norm` and `feed_forward_norm`, the norms after a branch
    `mixer_output_norm` and `feed_forward_output_norm`; a missing norm is None.

    Args:
        config: The layer's entry in the model's list.
        model: The residual stream: hidden size, norms and dropout.
        layer: Layer index in the whole model.
        shard: This rank's share of the model.
        cross: Attention to neighbours between the two branches (Retro), with a `cross_norm` in
            front; None for none.

    Shape:
        forward(x): [B, S, hidden] (S / tp tokens under sequence parallelism) -> the same, and
        losses: scalars, sums over these tokens. With `opens` the last branch's output may be
        returned beside the stream, and the first norm of the next layer adds it.
    """

    def __init__(
        self,
        config: LayerConfig,
        model: StackConfig,
        *,
        layer: int,
        shard: ShardContext,
        cross: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.recomputed, self.offloads = shard.recomputed, shard.offloads
        self.group = None if shard.sequence_parallel else shard.group
        self.index, self.config = layer, config
        self._wrapped: dict[str, Step] = {}
        self._adapters: tuple[LoraAdapter, ...] = ()  # that drop
        self.residual, self.drops = Selector(RESIDUAL, shard.kernels.residual), bool(model.dropout)

        def norm(*, there: bool) -> nn.Module | None:
            return stream_norm(model, shard) if there else None

        def dropout(name: str) -> DropoutSite:
            return DropoutSite(model.dropout, seed=shard.seed, layer=layer, name=name)

        before, after = config.norms in ("pre", "sandwich"), config.norms != "pre"
        has_first, has_second = config.mixer is not None, config.feed_forward is not None
        self.mixer_norm = norm(there=before and has_first)
        self.mixer = None
        if config.mixer is not None:
            self.mixer = config.mixer.build(model, layer=layer, shard=shard)
        self.mixer_output_norm = norm(there=after and has_first)
        self.mixer_dropout = dropout("mixer")
        self.cross_norm, self.cross = norm(there=cross is not None), cross
        self.feed_forward_norm = norm(there=before and has_second and not config.shared_norm)
        self.feed_forward = None
        if config.feed_forward is not None:
            self.feed_forward = config.feed_forward.build(model, layer=layer, shard=shard)
        self.feed_forward_output_norm = norm(there=after and has_second)
        self.feed_forward_dropout = dropout("feed_forward")
        # Made here, as an index that is read in a compiled graph makes it one layer's own.
        entries = (config.mixer, config.feed_forward)
        self._whose = [f"the {type(entry).__name__} of layer {layer}" for entry in entries]
        recompute_modules(self, self.recomputed.difference(WORDS))

    def forward(
        self, x: Stream, shared: ForwardContext, *, opens: bool = False
    ) -> tuple[Stream, Losses]:
        """Apply the layer."""
        if shared.saved is None or not torch.is_grad_enabled():
            return self._whole(x, shared, opens=opens)
        with shared.saved.of_layer(self.index, others=self._others(shared)):
            return self._whole(x, shared, opens=opens)

    def drop_in_adapters(self) -> None:
        """Have the masks of adapters inside go by the tokens of each pass."""
        from mt_tensor_parallel import adapters  # few models have some

        self._adapters = tuple(adapter for _, adapter in adapters(self))

    def wrap(self, wrap: Wrap | None) -> None:
        """Call the layer's computation through `wrap`, except in plain passes.

        Hooks of the layer, offloading, and recomputation of the whole layer stay outside. `wrap`
        gets the whole computation, and each of its `parts`; None takes the wrapping off.
        """
        steps = (self._run, self._run_open, self._mix, self._feed, self._both)
        self._wrapped = {} if wrap is None else {step.__name__: wrap(step) for step in steps}

    def _outer(self, step: Step) -> Step:
        return self._wrapped.get(step.__name__, step)

    def kernel_choices(self, like: Tensor) -> Iterator[Choice[Any]]:
        """Yield the kernels that add each branch to the stream, except the stage's last one."""
        chosen = self.residual.choose(like)
        if chosen.kernel == "reference":
            yield chosen
            return
        plain = RESIDUAL.get("reference")
        for reason in self._additions():
            yield chosen if reason is None else replace(chosen, candidate=plain, reason=reason)

    def shared_inputs(self) -> Iterator[SharedInput]:
        """Yield inputs that are proportional to a weight and read only by linear layers."""
        mixer, fed = self.mixer, self.feed_forward
        if self.config.shared_norm:
            yield from behind_norm(self.mixer_norm, mixer, fed)
        else:
            yield from behind_norm(self.mixer_norm, mixer)
            yield from behind_norm(self.feed_forward_norm, fed)
        for branch in (mixer, fed):
            if isinstance(branch, SharesInputs):
                yield from branch.shared_inputs()

    def _additions(self) -> Iterator[str | None]:
        """Why additions inside are plain; None where they are fused with another operation."""
        if self.config.residual_scale != 1:
            yield f"residual_scale {self.config.residual_scale:g} multiplies the branch"
        elif self.drops or self.config.norms == "post":
            yield None
        elif self.config.mixer is not None and self.config.feed_forward is not None:
            yield "both branches are added" if self.config.parallel else self._inside()

    def _inside(self) -> str | None:
        """Why the norm between the branches does not add the first branch; None where it may."""
        if self.cross is not None:
            return "attention to neighbours comes between"
        return apart(self.feed_forward_norm, frees_norm="norm" in self.recomputed)

    def hands_on_to(self, following: TransformerLayer) -> bool:
        """Whether the first norm of the following layer may add the last branch of this one."""
        whole = "layer" in self.recomputed or "layer" in following.recomputed
        first = following.mixer_norm if following.mixer is not None else following.feed_forward_norm
        frees_norm = "norm" in following.recomputed
        return not whole and apart(first, frees_norm=frees_norm) is None

    def _others(self, shared: ForwardContext) -> Iterator[Tensor]:
        """Tensors that the layer reads and does not make."""
        yield from self.parameters()
        yield from shared.constants()

    def _whole(self, x: Stream, shared: ForwardContext, *, opens: bool) -> tuple[Stream, Losses]:
        own = self._run_open if opens else self._run
        run = own if shared.plain else self._outer(own)
        if "layer" not in self.recomputed:
            return run(x, shared)
        x = added(x)
        shares = self.group is not None and x.numel() % self.group.size() == 0
        return recomputed(run, x, shared=shared, group=self.group if shares else None)

    def parts(self) -> list[Step]:
        """Return the layer in parts, to be applied one after the other.

        There is one part where the layer is recomputed as a whole, and where both branches have
        the same input. A feed-forward has parts of its own unless it is compiled or recomputed.
        """
        if "layer" in self.recomputed or self.offloads:
            return [self]
        if self.config.parallel:
            return [self._outer(self._both)]
        if self.cross is not None:
            return [self._outer(self._run)]
        steps = [] if self.mixer is None else [self._outer(self._mix)]
        return steps if self.feed_forward is None else steps + self._feeding()

    def _feeding(self) -> list[Step]:
        """Return the feed-forward's branch in its parts, which carry the stream with them."""
        fed, entry = self.feed_forward, self.config.feed_forward
        if not isinstance(fed, InParts) or entry is None or self._wrapped or is_recomputed(fed):
            return [self._outer(self._feed)]
        first, *between, last = fed.parts()

        def begin(x: Any, shared: ForwardContext) -> tuple[Any, Losses]:
            start = partial(first, shared=shared) if entry.drops else first
            (begun,), x = self._behind(self.feed_forward_norm, [start], x)
            return (x, begun), {}

        def through(part: Callable[..., Any]) -> Step:
            return lambda state, shared: ((state[0], part(state[1])), {})

        def end(state: Any, shared: ForwardContext) -> tuple[Any, Losses]:
            x, done = state
            fed, losses = take_losses(last(done), entry.loss_weights, of=self._whose[1])
            return self._add_fed(x, fed, shared, opens=False), losses

        return [begin, *map(through, between), end]

    def _run(self, x: Stream, shared: ForwardContext) -> tuple[Tensor, Losses]:
        x, losses = self._through(x, shared, opens=False)
        return added(x), losses

    def _run_open(self, x: Stream, shared: ForwardContext) -> tuple[Stream, Losses]:
        return self._through(x, shared, opens=True)

    def _through(self, x: Stream, shared: ForwardContext, *, opens: bool) -> tuple[Stream, Losses]:
        if self.config.parallel:
            return self._both(x, shared, opens=opens)
        is_last = self.config.feed_forward is None
        x, losses = self._mix(x, shared, opens=opens if is_last else self._inside() is None)
        x, more = self._feed(self._attend_to_neighbours(x, shared), shared, opens=opens)
        return x, add_losses(losses, more)

    def _attend_to_neighbours(self, x: Stream, shared: ForwardContext) -> Stream:
        if self.cross is None or shared.memory is None:
            return x
        cross = partial(self.cross, shared=shared)
        (found,), x = self._behind(self.cross_norm, [cross], x)
        return x + found

    def _tell_adapters(self, shared: ForwardContext) -> None:
        """Give adapters the numbers of their tokens; also when a layer is computed again."""
        for adapter in self._adapters:
            adapter.tokens = shared.token_index

    def _mix(
        self, x: Stream, shared: ForwardContext, *, opens: bool = False
    ) -> tuple[Stream, Losses]:
        self._tell_adapters(shared)
        mixer, entry = self.mixer, self.config.mixer
        if mixer is None or entry is None:
            return x, {}
        (output,), x = self._behind(self.mixer_norm, [partial(mixer, shared=shared)], x)
        mixed, losses = take_losses(output, entry.loss_weights, of=self._whose[0])
        return self._add_mixed(x, mixed, shared, opens=opens), losses

    def _feed(
        self, x: Stream, shared: ForwardContext, *, opens: bool = False
    ) -> tuple[Stream, Losses]:
        self._tell_adapters(shared)
        feed_forward, entry = self.feed_forward, self.config.feed_forward
        if feed_forward is None or entry is None:
            return x, {}
        feed = partial(feed_forward, shared=shared) if entry.drops else feed_forward
        (output,), x = self._behind(self.feed_forward_norm, [feed], x)
        fed, losses = take_losses(output, entry.loss_weights, of=self._whose[1])
        return self._add_fed(x, fed, shared, opens=opens), losses

    def _both(
        self, x: Stream, shared: ForwardContext, *, opens: bool = False
    ) -> tuple[Stream, Losses]:
        self._tell_adapters(shared)
        mixer, first = self.mixer, self.config.mixer
        feed_forward, entry = self.feed_forward, self.config.feed_forward
        if mixer is None or first is None:
            return self._feed(x, shared, opens=opens)
        if feed_forward is None or entry is None:
            return self._mix(x, shared, opens=opens)
        mix = partial(mixer, shared=shared)
        feed = partial(feed_forward, shared=shared) if entry.drops else feed_forward
        if self.config.shared_norm:
            outputs, x = self._behind(self.mixer_norm, [mix, feed], x)
        else:
            outputs, x = self._behind(self.mixer_norm, [mix], x)
            outputs += self._behind(self.feed_forward_norm, [feed], x)[0]
        mixed, losses = take_losses(outputs[0], first.loss_weights, of=self._whose[0])
        fed, more = take_losses(outputs[1], entry.loss_weights, of=self._whose[1])
        x = added(self._add_mixed(x, mixed, shared, opens=False))
        return self._add_fed(x, fed, shared, opens=opens), add_losses(losses, more)

    def _behind(
        self, norm: nn.Module | None, branches: list[Callable[[Tensor], Output]], x: Stream
    ) -> tuple[list[Output], Tensor]:
        """Norm the stream, and return the branches' outputs with the complete stream."""
        if norm is not None and "norm" in self.recomputed:
            x = added(x)
            return discard_between_all(norm, branches, x), x
        y, x = normed(norm, x)
        return [branch(y) for branch in branches], x

    def _add_mixed(
        self, x: Tensor, mixed: Tensor, shared: ForwardContext, *, opens: bool
    ) -> Stream:
        sites = self.mixer_output_norm, self.mixer_dropout
        return self._add(x, mixed, sites, shared, opens=opens)

    def _add_fed(self, x: Tensor, fed: Tensor, shared: ForwardContext, *, opens: bool) -> Stream:
        sites = self.feed_forward_output_norm, self.feed_forward_dropout
        return self._add(x, fed, sites, shared, opens=opens)

    def _add(
        self,
        x: Tensor,
        y: Tensor,
        sites: tuple[nn.Module | None, DropoutSite],
        shared: ForwardContext,
        *,
        opens: bool,
    ) -> Stream:
        """Add a branch's output to the stream, with the norm of the branch or of the sum."""
        (norm, dropout), scale = sites, self.config.residual_scale
        is_post = self.config.norms == "post"
        if norm is not None and not is_post:
            y = norm(y)
        if scale != 1:
            total: Stream = torch.add(x, dropout(y, shared.hidden_index), alpha=scale)
        else:
            kernel = self.residual.find(x)
            opens = opens or (is_post and norm is not None and not is_recomputed(norm))
            total = kernel.function(x, y, dropout, shared.hidden_index, opens=opens)
        return normed(norm, total)[0] if is_post else total
