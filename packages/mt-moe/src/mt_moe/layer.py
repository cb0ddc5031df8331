"""A mixture-of-experts layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mt_files import check_type
from mt_parallel_state import (
    Group,
    PartitionSpec,
    gather_from_group,
    group_rank,
    group_size,
    outside_graph,
    scatter_to_group,
    shard_param,
)
from mt_tensor_parallel import ColumnParallelLinear
from torch import Tensor, nn

from mt_moe.dispatch.agreement import Agreement
from mt_moe.dispatch.choice import make_dispatcher
from mt_moe.dispatch.dispatcher import DispatchOutput
from mt_moe.dispatch.finite import finite
from mt_moe.dispatch.in_flight import InFlight
from mt_moe.experts.experts import Experts
from mt_moe.groups import ExpertGroups
from mt_moe.options import MoEOptions
from mt_moe.routing.balance import LossSum, count_choices
from mt_moe.routing.capacity import Capacity, kept_choices
from mt_moe.routing.router import Router, RouterOutput
from mt_moe.shared_expert import SharedExpert

SEQUENCE_DIM = 1


class MoEOutput(NamedTuple):
    """The output of a layer.

    Attributes:
        hidden: Hidden states, in the shape of the input.
        losses: Balancing losses by name, as sums over this rank's tokens with their counts.
        load: Number of this rank's tokens that chose each expert, int64 [E], dropped ones included.
        dropped: Number of dropped choices, int64; None without a capacity.
    """

    hidden: Tensor
    losses: dict[str, LossSum]
    load: Tensor
    dropped: Tensor | None


class _Context(NamedTuple):
    """What later parts of a forward need from `begin`: a nest of tensors, as `InFlight` is.

    Attributes:
        shape: Shape of the input.
        routed: Shape [B, S] of the tokens that this rank routes.
        dtype: Dtype of the input.
        group_tokens: Number of tokens in the group that shares the balancing losses.
        drops: Whether some choices may mean no expert.
        losses: Balancing losses by name, sum and count.
        load: Number of choices of each expert.
        dropped: Number of dropped choices.
        shared: Output of the shared expert.
    """

    shape: torch.Size
    routed: torch.Size
    dtype: torch.dtype
    group_tokens: int
    drops: bool
    losses: dict[str, tuple[Tensor, Tensor]]
    load: Tensor
    dropped: Tensor | None
    shared: Tensor | None = None


class MoELayer(nn.Module):
    """Route each token to some experts, and sum their results with the router's weights.

    Under sequence parallelism tokens are split over tp along dim 1. Without it every rank of tp has
    all tokens: each rank routes a part of them, the results are gathered, and backward gathers the
    gradients, so that no expert computes a token twice. See the dispatchers for their collectives.

    Router, latent projections and the gate of the shared expert are replicated; their gradients are
    partial sums over tp, as their sharding records say.

    Args:
        hidden_size: Size of the tokens.
        ffn_size: Width of each expert.
        num_experts: Number of experts on all ranks together.
        options: See `MoEOptions`.
        groups: The ranks that share experts and tokens; None is one rank.
        sequence_parallel: Whether the input is a sequence shard.
        seed: Seed of the router's jitter.
        name: Name of the layer, a key of the jitter.
        dtype: Dtype of the parameters.
        device: Device of the parameters; `"meta"` draws no values.

    Shape:
        forward: [B, S, hidden] (S / tp under sequence parallelism) or [T, hidden] -> the same.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The sizes don't fit each other or the groups.
    """

    def __init__(  # noqa: PLR0913 - a layer's own settings, all but three by keyword
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        *,
        options: MoEOptions | None = None,
        groups: ExpertGroups | None = None,
        sequence_parallel: bool = False,
        seed: int = 0,
        name: str = "moe",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "ffn_size": ffn_size, "num_experts": num_experts}
        for what, size in sizes.items():
            check_type(what, size, int)
            if size < 1:
                raise ValueError(f"{what} must be at least 1, got {size}")
        options = MoEOptions() if options is None else options
        groups = ExpertGroups() if groups is None else groups
        check_type("options", options, MoEOptions)
        check_type("groups", groups, ExpertGroups)
        self.options, self.groups, self.num_experts = options, groups, num_experts
        self.sequence_parallel = sequence_parallel and group_size(groups.tp) > 1
        partial = ("tp",) if group_size(groups.tp) > 1 else ()
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        self.router = Router(
            *(hidden_size, num_experts, options.router),
            **{"group": groups.tokens, "step_group": groups.step, "partial_grad": partial},
            **{"seed": seed, "name": name, **factory},
        )
        inner = hidden_size if options.latent_size is None else options.latent_size
        self.experts = Experts(
            inner, ffn_size, num_experts, options.experts, groups=groups, **factory
        )
        self.shared: SharedExpert | None = None
        if options.shared_size:
            self.shared = SharedExpert(
                *(hidden_size, options.shared_size, options.experts),
                gated_output=options.shared_gate,
                tp=groups.tp,
                sequence_parallel=self.sequence_parallel,
                **factory,
            )
        self.to_latent: ColumnParallelLinear | None = None
        self.from_latent: ColumnParallelLinear | None = None
        if options.latent_size is not None:
            self.to_latent = _whole_linear(hidden_size, inner, partial, factory)
            self.from_latent = _whole_linear(inner, hidden_size, partial, factory)
        self.dispatcher = make_dispatcher(options.dispatcher, num_experts, groups)
        self._agreement = Agreement(groups.experts, groups.tokens)
        # The dispatcher tells the ranks of its group of NaN; other ranks with the tokens of the
        # same sequences would wait for ever in their next collective.
        reached = set(_ranks(groups.tokens)) <= set(_ranks(groups.experts))
        self._shares_nan = group_size(groups.tokens) > 1 and not reached

    def forward(
        self, x: Tensor, *, valid: Tensor | None = None, token_index: Tensor | None = None
    ) -> MoEOutput:
        """Apply the layer.

        Args:
            x: Hidden states.
            valid: True for real tokens. Others are neither sent nor counted, and get the shared
                expert's result alone. None means that all are real.
            token_index: A number for each token, unique within a step and the same for every
                layout. Jitter depends on it, and which tokens a full expert drops.

        Shape:
            x: see the class; valid, token_index: the shape of x without its last dim.

        Raises:
            TypeError: `x` is not a floating tensor.
            ValueError: The shapes don't fit.
            RoutingError: A router's weights are not finite.
        """
        if not torch.compiler.is_compiling():
            begun = self.begin(x, valid=valid, token_index=token_index)
            return self.finish(self.compute(begun))
        # A compiled graph breaks around the dispatcher's collectives, so nothing overlaps.
        tokens, context = self._route(x, valid, token_index)
        dispatched = self.dispatcher.dispatch(*tokens, drops=context.drops)
        context = context._replace(shared=None if self.shared is None else self.shared(x))
        y = self.dispatcher.combine(self._apply_experts(dispatched, context), dispatched.handle)
        return self._output(y, context)

    def begin(
        self, x: Tensor, *, valid: Tensor | None = None, token_index: Tensor | None = None
    ) -> tuple[InFlight, Any]:
        """Route tokens and start to send them; the shared expert computes meanwhile.

        `begin`, `compute` and `finish` are the three parts of `forward`. Each gets what the one
        before it returned, and gradients flow between them through the tensors in that value alone.
        Work between two parts overlaps with the communication.
        """
        tokens, context = self._route(x, valid, token_index)
        in_flight = self.dispatcher.start_dispatch(*tokens, drops=context.drops)
        # Between start and finish: the shared expert overlaps with the dispatch.
        shared = None if self.shared is None else self.shared(x)
        return in_flight, context._replace(shared=shared)

    def compute(self, begun: tuple[InFlight, Any]) -> tuple[InFlight, Any]:
        """Wait for the tokens, apply this rank's experts, and start to send the results back."""
        in_flight, context = begun
        dispatched = self.dispatcher.finish_dispatch(in_flight)
        y = self._apply_experts(dispatched, context)
        return self.dispatcher.start_combine(y, dispatched.handle), context

    def finish(self, computed: tuple[InFlight, Any]) -> MoEOutput:
        """Wait for the results and return the output."""
        in_flight, context = computed
        return self._output(self.dispatcher.finish_combine(in_flight), context)

    def _route(
        self, x: Tensor, valid: Tensor | None, token_index: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], _Context]:
        """Return the tokens that this rank routes, with their experts and weights."""
        _check_input(x, valid, token_index)
        self._agree(x)
        replicated = self.groups.tp is not None and not self.sequence_parallel
        tp = group_size(self.groups.tp) if replicated else 1
        group_tokens = -(-x.shape[:-1].numel() * group_size(self.groups.tokens) // tp)
        own = x if x.dim() == SEQUENCE_DIM + 2 else x.unsqueeze(0)
        valid, token_index = (
            None if each is None else each.reshape(own.shape[:2]) for each in (valid, token_index)
        )
        if replicated:
            own, valid, token_index = _scatter(own, valid, token_index, group=self.groups.tp)
        routed = self.router(own, valid=valid, token_index=token_index)
        weights, chosen, dropped = self._limit(routed, token_index, group_tokens)
        if self._shares_nan:
            weights = outside_graph(_share_nan)(weights, self.groups.tokens)
        load = count_choices(routed.experts, self.num_experts + 1)
        inner = own if self.to_latent is None else self.to_latent(own)
        tokens = inner.flatten(0, 1), chosen, weights
        context = _Context(
            shape=x.shape,
            routed=own.shape[:2],
            dtype=x.dtype,
            group_tokens=group_tokens,
            drops=valid is not None or self._capacity is not None,
            losses={name: (loss.sum, loss.count) for name, loss in routed.losses.items()},
            load=load[:-1],  # the last means no expert
            dropped=dropped,
        )
        return _scaled(*tokens) if self.options.scale_input else tokens, context

    def _apply_experts(self, dispatched: DispatchOutput, context: _Context) -> Tensor:
        """Apply this rank's experts to the rows that arrived."""
        rows, counts, _, exact, max_count = dispatched
        capacity = self._padded_capacity(context.group_tokens, max_count)
        return self.experts(rows, counts, exact=exact, capacity=capacity)

    def _output(self, y: Tensor, context: _Context) -> MoEOutput:
        """Return the layer's output, given the sums over each token's experts."""
        if self.options.scale_input:
            y = y.unflatten(0, (-1, self.options.router.top_k)).sum(1)
        y = y.unflatten(0, context.routed)
        y = (y if self.from_latent is None else self.from_latent(y)).to(context.dtype)
        if self.groups.tp is not None and not self.sequence_parallel:
            y = gather_from_group(y, self.groups.tp, dim=SEQUENCE_DIM)
            y = y.narrow(SEQUENCE_DIM, 0, context.shape[-2])
        y = y.reshape(context.shape)
        hidden = y if context.shared is None else y + context.shared
        losses = {name: LossSum(*each) for name, each in context.losses.items()}
        return MoEOutput(hidden, losses, context.load, context.dropped)

    def _agree(self, x: Tensor) -> None:
        """Compare the settings of all ranks, once."""
        if not self._agreement.reached:
            outside_graph(self._agreement.check)(
                x.device,
                num_experts=self.num_experts,
                hidden_size=x.shape[-1],
                dtype=x.dtype,
                router=self.options.router,
                capacity=self.options.capacity,
            )

    @property
    def _capacity(self) -> Capacity | None:
        """The capacity in training; in evaluation a token must not depend on other requests."""
        return self.options.capacity if self.training else None

    def _limit(
        self, routed: RouterOutput, token_index: Tensor | None, group_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Drop the choices beyond the experts' capacity."""
        weights, experts, _ = routed
        if self._capacity is None:
            return weights, experts, None
        kept = kept_choices(
            *(weights, experts, self.num_experts, self._capacity),
            group=self.groups.tokens,
            token_index=token_index,
            group_tokens=group_tokens,
        )
        dropped = (~kept & (experts < self.num_experts)).sum()
        return (
            weights.masked_fill(~kept, 0),
            experts.masked_fill(~kept, self.num_experts),
            dropped,
        )

    def _padded_capacity(self, group_tokens: int, max_count: int) -> int | None:
        """Return the number of rows to pad each expert to, over all groups that send to it.

        A group with more tokens than this rank's may send more rows than its capacity suggests;
        `max_count` then decides.
        """
        capacity = self._capacity
        if capacity is None or not capacity.pad:
            return None
        own = capacity.of(group_tokens, self.options.router.top_k, self.num_experts)
        return max(max_count, own * self._senders(group_size(self.groups.tokens)))

    def _senders(self, size: int) -> int:
        """Return how many token groups of a size send rows here, each up to its own capacity."""
        ranks = set(_ranks(self.groups.experts))
        if self.groups.tokens is None:
            return len(ranks)
        tokens = set(_ranks(self.groups.tokens))
        if tokens >= ranks:
            return 1
        return -(-len(ranks) // size) if tokens <= ranks else len(ranks)


def _check_input(x: Tensor, valid: Tensor | None, token_index: Tensor | None) -> None:
    check_type("x", x, Tensor)
    if x.dim() not in (2, 3) or not x.is_floating_point():
        raise ValueError(
            f"x must be floating, [B, S, hidden] or [T, hidden], got {x.dtype} {tuple(x.shape)}"
        )
    for name, given in (("valid", valid), ("token_index", token_index)):
        if given is not None and given.shape != x.shape[:-1]:
            raise ValueError(
                f"{name} {tuple(given.shape)} must have an element for each token of x "
                f"{tuple(x.shape)}"
            )


def _scaled(x: Tensor, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a token for each choice, multiplied by the choice's weight.

    The remaining weights are 1, or NaN for weights that are not finite, which dispatchers look for.

    Shape:
        x: [T, H]; experts, weights: [T, k]. Returns [T * k, H], [T * k, 1] twice.
    """
    rows = (x.unsqueeze(1) * weights.unsqueeze(2)).to(x.dtype).flatten(0, 1)
    ones = weights.detach() * 0 + 1
    return rows, experts.reshape(-1, 1), ones.reshape(-1, 1)


def _share_nan(weights: Tensor, group: Group) -> Tensor:
    """Make the weights NaN on all ranks of a group if one rank's are not finite: all raise."""
    good = finite(weights).int()
    torch.distributed.all_reduce(good, op=torch.distributed.ReduceOp.MIN, group=group)
    return torch.where(good.bool(), weights, torch.nan)


def _ranks(group: Group) -> list[int]:
    return [0] if group is None else torch.distributed.get_process_group_ranks(group)


def _whole_linear(
    size: int, out: int, partial: tuple[str, ...], factory: dict[str, Any]
) -> ColumnParallelLinear:
    """Return a linear layer replicated over tp, for tokens split over tp."""
    linear = ColumnParallelLinear(size, out, bias=False, **factory)
    shard_param(linear.weight, PartitionSpec(), partial_grad=partial)
    return linear


def _scatter(
    x: Tensor, valid: Tensor | None, token_index: Tensor | None, *, group: Group
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return this rank's part of replicated tokens, padded with tokens that aren't valid."""
    missing = -x.shape[SEQUENCE_DIM] % group_size(group)
    if missing:
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        valid = F.pad(real if valid is None else valid, (0, missing))
        x = F.pad(x, (0, 0, 0, missing))
        token_index = None if token_index is None else F.pad(token_index, (0, missing))

    def part(each: Tensor | None) -> Tensor | None:
        if each is None:
            return None
        return each.chunk(group_size(group), SEQUENCE_DIM)[group_rank(group)]

    return scatter_to_group(x, group, dim=SEQUENCE_DIM), part(valid), part(token_index)
