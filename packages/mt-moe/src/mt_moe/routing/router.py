"""The router: logits, chosen experts, weights and balancing losses."""

from __future__ import annotations

from collections import deque
from math import sqrt
from typing import NamedTuple, cast

import torch
from mt_files import check_type
from mt_parallel_state import Group, PartitionSpec, hash_key, random_uniform, shard_param
from torch import Tensor, nn

from mt_moe.initial import filled
from mt_moe.recomputation import in_backward
from mt_moe.routing.balance import (
    LossSum,
    balance_loss,
    count_choices,
    normalized,
    sum_counts,
    z_loss,
)
from mt_moe.routing.choice import RouterOptions, Routing, route
from mt_moe.routing.expert_bias import ExpertBias
from mt_moe.routing.record import RoutingRecord
from mt_moe.routing.rules import check_number, training_obstacle
from mt_moe.routing.sinkhorn import sinkhorn_bias
from mt_moe.wide_linear import wide_linear


class RouterOutput(NamedTuple):
    """The output of a router.

    Attributes:
        weights: Weight of each choice; 0 for tokens that aren't valid.
        experts: Chosen experts; the number of experts, which means no expert, for tokens that
            aren't valid.
        losses: Balancing losses by name, times their coefficients.

    Shape:
        weights, experts: [tokens, k].
    """

    weights: Tensor
    experts: Tensor
    losses: dict[str, LossSum]


class Router(nn.Module):
    """Choose the experts of each token.

    Logits are `x @ weight.T` in the options' dtype, or in the dtype of x if that is wider, whatever
    autocast says; backward keeps x in its own dtype. Balancing losses need an all-reduce of integer
    counts over `group` each, and Sinkhorn the sums of its iterations; nothing else is communicated.

    Args:
        hidden_size: Size of the tokens.
        num_experts: Number of experts to choose from.
        options: See `RouterOptions`.
        group: The ranks with the other tokens of the same sequences and micro-batch; None is this
            rank alone. Balancing losses don't depend on how tokens are split over it.
        step_group: All ranks with tokens of the same step, for `global_aux`; None is `group`.
        partial_grad: Axes over which the gradients are partial sums: `("tp",)` if tokens are split
            over tp.
        seed: Seed of the jitter.
        name: Name of the router in the model, a key of the jitter.
        dtype: Dtype of weight and bias.
        device: Device of weight and bias.

    Attributes:
        weight: Weight, [E, hidden].
        bias: Bias of the logits, [E], or None.
        expert_bias: See `ExpertBias`, or None.
        record: Records or replays choices; see `recorded_routes`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The options don't fit the number of experts.
    """

    bias: nn.Parameter | None

    def __init__(  # noqa: PLR0913 - a layer's own settings, all but three by keyword
        self,
        hidden_size: int,
        num_experts: int,
        options: RouterOptions,
        *,
        group: Group = None,
        step_group: Group = None,
        partial_grad: tuple[str, ...] = (),
        seed: int = 0,
        name: str = "router",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_type("options", options, RouterOptions)
        check_number(options, num_experts)
        self.options, self.num_experts = options, num_experts
        self.group, self.step_group = group, group if step_group is None else step_group
        self.record: RoutingRecord | None = None
        self._key = hash_key("jitter", seed, name)
        how = {"std": 1 / sqrt(3 * hidden_size), "dtype": dtype, "device": device}
        weight = filled((num_experts, hidden_size), **how)
        self.weight = shard_param(weight, PartitionSpec(), partial_grad=partial_grad)
        self.bias = None
        if options.linear_bias:
            bias = filled((num_experts,), **how)
            self.bias = shard_param(bias, PartitionSpec(), partial_grad=partial_grad)
        self.expert_bias: ExpertBias | None = None
        if options.expert_bias is not None:
            self.expert_bias = ExpertBias(
                num_experts,
                options.top_k,
                options.expert_bias,
                bounded=options.score != "sqrtsoftplus",
                device=device,
            )
        if "global_aux" in options.losses:
            so_far = torch.zeros(1, num_experts + 1, dtype=torch.int64, device=device)
            self.register_buffer("so_far", so_far, persistent=False)
        self._loads: deque[tuple[Tensor, Tensor]] = deque()

    def forward(
        self, x: Tensor, *, valid: Tensor | None = None, token_index: Tensor | None = None
    ) -> RouterOutput:
        """Route each token.

        Args:
            x: Hidden states. Each of the B rows is one sequence for `sequence_aux`.
            valid: True for real tokens; None means that all are.
            token_index: A number for each token, unique within a step and the same for every
                layout; needed for jitter.

        Shape:
            x: [B, S, hidden] or [T, hidden], one sequence; valid, token_index: [B, S] or [T].

        Raises:
            ValueError: The weight is to be trained, and the options give it no gradient.
        """
        obstacle = training_obstacle(self.options)
        if obstacle and self.training and self.weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(obstacle)
        logits = self.logits(x, token_index)
        shape = (1, *logits.shape) if logits.dim() == 2 else logits.shape
        valid = None if valid is None else valid.reshape(shape[:-1])
        flat = logits.flatten(0, -2)
        routing = self._route(flat)
        losses = self._losses(logits.view(shape), routing, valid)
        self._observe(routing, valid)
        weights, experts, _ = routing
        if valid is not None:
            none = ~valid.reshape(-1, 1)
            weights = weights.masked_fill(none, 0)
            experts = experts.masked_fill(none, self.num_experts)
        return RouterOutput(weights, experts, losses)

    def logits(self, x: Tensor, token_index: Tensor | None = None) -> Tensor:
        """Return the logits; in training the tokens are jittered first, if the options say so.

        Raises:
            ValueError: Jitter lacks token indices, or the tokens have another size.
        """
        check_type("x", x, Tensor)
        if x.dim() not in (2, 3) or x.shape[-1] != self.weight.shape[1]:
            raise ValueError(
                f"x {tuple(x.shape)} must be [B, S, {self.weight.shape[1]}] or "
                f"[T, {self.weight.shape[1]}]"
            )
        if self.training and self.options.jitter:
            x = self._jittered(x, token_index)
        return wide_linear(x, self.weight, self.bias, self.options.dtype)

    def end_step(self) -> None:
        """Forget the micro-batches that `global_aux` has counted; call it after each step."""
        if "global_aux" in self.options.losses:
            cast("Tensor", self.so_far).zero_()
            self._loads.clear()

    def _jittered(self, x: Tensor, token_index: Tensor | None) -> Tensor:
        if token_index is None:
            raise ValueError(
                f"jitter={self.options.jitter} needs token_index in training: noise is a function "
                "of it, so that it is the same for every layout"
            )
        columns = torch.arange(x.shape[-1], device=x.device)
        index = token_index.to(x.device).unsqueeze(-1) * x.shape[-1] + columns
        noise = random_uniform(self._key, index.view(x.shape))
        return x * (1 + self.options.jitter * (2 * noise - 1)).to(x.dtype)

    def _route(self, logits: Tensor) -> Routing:
        experts = None if self.record is None else self.record.take()
        if experts is None and self.options.sinkhorn and self.training:
            bias = sinkhorn_bias(logits, self.options.sinkhorn, group=self.group)
            experts = (logits.detach().double() + bias).topk(self.options.top_k, -1).indices
        bias = None if self.expert_bias is None else self.expert_bias.value
        routing = route(logits, self.options, bias=bias, experts=experts)
        if self.record is not None:
            self.record.put(routing.experts)
        return routing

    @torch.no_grad()
    def _observe(self, routing: Routing, valid: Tensor | None) -> None:
        """Count choices for the expert bias, in training and not in recomputations."""
        if self.expert_bias is None or not self.training or in_backward():
            return
        flat = None if valid is None else valid.flatten()
        counts = count_choices(routing.experts, self.num_experts, flat)
        self.expert_bias.observe(counts, routing.scores, flat)

    def _losses(self, logits: Tensor, routing: Routing, valid: Tensor | None) -> dict[str, LossSum]:
        wanted, found = self.options.losses, dict[str, LossSum]()
        if set(wanted) - {"z"}:
            found = self._balance_losses(logits.shape, routing, valid)
        if "z" in wanted:
            found["z"] = z_loss(logits.to(self.options.dtype), valid)
        return {name: LossSum(found[name].sum * wanted[name], found[name].count) for name in wanted}

    def _balance_losses(
        self, shape: torch.Size, routing: Routing, valid: Tensor | None
    ) -> dict[str, LossSum]:
        """Return the balancing losses; as published, they count choices by the scores alone."""
        k, shares = self.options.top_k, normalized(routing.scores).view(shape)
        with torch.no_grad():
            chosen = routing.scores.topk(k, -1).indices.view(*shape[:-1], k)
            counts = count_choices(chosen, self.num_experts, valid)
            tokens = counts.new_full((shape[0],), shape[1]) if valid is None else valid.sum(1)
            own = counts.sum(0, keepdim=True), tokens.sum(0, keepdim=True)
            counts, tokens = sum_counts(counts, tokens, self.group)
            whole = counts.sum(0, keepdim=True), tokens.sum(0, keepdim=True)
        loads = {"aux": whole, "sequence_aux": (counts, tokens)}
        if "global_aux" in self.options.losses:
            loads["global_aux"] = self._step_load(*own) if self.training else whole
        return {
            name: balance_loss(shares, *loads[name], top_k=k, valid=valid)
            for name in loads
            if name in self.options.losses
        }

    def _step_load(self, counts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the choices of all ranks in this step so far, and the number of their tokens."""
        # A recomputation has to see the load that its forward saw, which has grown since. Backwards
        # come in the order of their forwards.
        if in_backward() and self._loads:
            return self._loads.popleft()
        so_far = cast("Tensor", self.so_far)
        total = so_far + torch.cat([counts, tokens.unsqueeze(1)], 1)
        so_far.copy_(total)
        load = sum_counts(total[:, :-1], total[:, -1], self.step_group)
        if not in_backward():
            self._loads.append(load)
        return load

    def extra_repr(self) -> str:
        """Return the number of experts and the options, for `repr`."""
        return f"experts={self.num_experts}, {self.options!r}"
