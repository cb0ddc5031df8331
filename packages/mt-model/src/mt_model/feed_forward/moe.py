"""A mixture of experts as the feed-forward of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from mt_moe import (
    BiasOptions,
    Capacity,
    ExpertOptions,
    MoELayer,
    MoEOptions,
    MoEOutput,
    RouterOptions,
    in_backward,
)
from mt_tensor_parallel import choose_gemms
from torch import Tensor

from mt_model.attend.context import ForwardContext
from mt_model.block.initial import start_from
from mt_model.block.losses import Losses, sum_losses
from mt_model.block.shard_context import ShardContext
from mt_model.block.stream import StreamConfig
from mt_model.kernels.dtype import DTYPES

if TYPE_CHECKING:
    from mt_model.feed_forward.moe_config import MoEConfig


def options_of(
    config: MoEConfig, dtype: torch.dtype = torch.float32, *, invariant: bool = False
) -> MoEOptions:
    """Return what mt-moe makes the layer of; losses have the coefficient 1 there.

    Args:
        config: of the layer.
        dtype: of the model, which scores have where it is wider than theirs.
        invariant: Whether a token's bits depend on nothing but the token.

    Raises:
        ValueError: Two fields exclude each other.
    """
    losses = dict.fromkeys(("z" if n == "router_z" else n for n in config.loss_weights), 1.0)
    return MoEOptions(
        router=RouterOptions(
            top_k=config.top_k,
            score=config.score,
            normalize=config.normalize,
            scale=config.scale,
            dtype=torch.promote_types(DTYPES[config.score_dtype], dtype),
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            group_top=config.group_top,
            sinkhorn=config.sinkhorn,
            jitter=config.jitter,
            linear_bias=config.router_bias,
            expert_bias=BiasOptions(kind=config.bias_kind, rate=config.bias_rate)
            if config.bias_rate
            else None,
            losses=losses,
            invariant=invariant,
        ),
        experts=ExpertOptions(
            activation=config.activation,
            gated=config.gated,
            bias=config.bias,
            clamp=config.clamp,
            up_offset=config.up_offset,
            invariant=invariant,
        ),
        capacity=None
        if config.capacity_factor is None
        else Capacity(factor=config.capacity_factor, policy=config.drop),
        shared_size=config.shared_size,
        shared_gate=config.shared_gate,
        scale_input=config.scale_input,
        latent_size=config.latent_size,
        dispatcher=config.dispatcher,
    )


class MoE(MoELayer):
    """mt-moe's layer in a model: its losses as the model's, its tokens by their global index.

    Parameters: `router.weight` [E, hidden], whole on every rank; `experts.up.weight`
    [E, 2, ffn, hidden] and `experts.down.weight` [E, hidden, ffn], dealt over "ep" and split over
    "etp"; `shared.*` as in an MLP. The dispatcher states the collectives.

    Args:
        config: sizes, router and experts.
        model: width of input and output, and the longest sequence.
        layer: global index.
        shard: This rank's share of the model.

    Shape:
        forward(x): [B, S, hidden] (S / tp tokens under sequence parallelism) -> the same, with
        losses where the configuration has any.

    Attributes:
        load: how often this rank's tokens chose each expert since a step began, int64 [E + 1]; the
            last is the choices that no expert took.
    """

    def __init__(
        self, config: MoEConfig, stream: StreamConfig, *, layer: int, shard: ShardContext
    ) -> None:
        super().__init__(
            stream.hidden_size,
            config.width,
            config.num_experts,
            options=options_of(config, shard.dtype, invariant=shard.kernels.is_invariant),
            groups=shard.experts,
            sequence_parallel=shard.sequence_parallel,
            seed=shard.seed,
            name=f"layers.{layer}",
            dtype=shard.dtype,
            device="meta",
        )
        self.config, self.shard = config, shard
        if shard.kernels.is_invariant:
            choose_gemms(self, lambda _: shard.gemm)
        self.load: Tensor
        load = torch.zeros(config.num_experts + 1, dtype=torch.int64)
        self.register_buffer("load", load, persistent=False)
        self.max_length = stream.max_sequence_length
        writers = (self.experts.down, self.shared and self.shared.down, self.from_latent)
        for linear in writers:
            if linear is not None:
                start_from(linear.weight, "residual")
        for module in self.modules():  # parameters get memory later, buffers are small
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.zeros_like(buffer, device=shard.device))

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - as layers call it
        self, x: Tensor, shared: ForwardContext | None = None
    ) -> Tensor | tuple[Tensor, Losses]:
        """Apply the layer."""
        return self._counted(super().forward(x, token_index=self._token_index(x, shared)))

    def parts(self) -> list[Callable[..., Any]]:
        """The layer in three parts, between which tokens travel; see `InParts`."""

        def begin(x: Tensor, shared: ForwardContext | None = None) -> Any:
            return self.begin(x, token_index=self._token_index(x, shared))

        return [begin, self.compute, lambda computed: self._counted(self.finish(computed))]

    def _counted(self, out: MoEOutput) -> Tensor | tuple[Tensor, Losses]:
        """Count the experts' load, and return the output with the losses as the model's."""
        y, losses, load, dropped = out
        if self.training and not in_backward():  # where a layer is made again it was counted
            none = load.new_zeros(()) if dropped is None else dropped
            self.load += torch.cat([load, none.view(1)])
        if not self.config.loss_weights:
            return y
        own = {"router_z" if name == "z" else name: each.sum for name, each in losses.items()}
        if not self.shard.sequence_parallel:  # each rank has routed a part of the tokens
            own = sum_losses(own, self.shard.group)
        return y, own

    def _token_index(self, x: Tensor, shared: ForwardContext | None) -> Tensor | None:
        """A number for each token that no layout changes; None where none is needed."""
        if shared is None:
            return None
        ids = shared.sample_ids
        rows = torch.arange(x.shape[0]) if ids is None else ids
        context, ranks = self.shard.context, self.shard.tp
        whole = x.shape[1] * (ranks if self.shard.sequence_parallel else 1) * context.size
        places = self.shard.between(context.positions(whole, x.device), dim=0)
        return rows.to(x.device)[:, None] * self.max_length + places
