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

from mt_moe.agreement import Agreement
from mt_moe.balance import LossSum, count_choices
from mt_moe.capacity import Capacity, kept_choices
from mt_moe.dispatch import Sent, finite
from mt_moe.dispatchers import make_dispatcher
from mt_moe.experts import Experts
from mt_moe.flight import Travelling
from mt_moe.groups import ExpertGroups
from mt_moe.moe_options import MoEOptions
from mt_moe.router import Routed, Router
from mt_moe.shared import SharedExpert

SEQUENCE_DIM = 1


class MoEOutput(NamedTuple):
    """What a layer returns.

    Attributes:
        hidden: Of the shape of the input.
        losses: Balancing losses by name, sums over this rank's tokens with their counts.
        load: How many of this rank's tokens chose each expert, int64 [E], of which some may be
            dropped.
        dropped: How many of these choices no expert took, int64; None where no capacity drops any.
    """

    hidden: Tensor
    losses: dict[str, LossSum]
    load: Tensor
    dropped: Tensor | None


class _End(NamedTuple):
    """What the end of a pass needs of its beginning: a nest of tensors, as `Travelling`."""

    shape: torch.Size  # of the input
    own: torch.Size  # of it, what this rank routes: [B, S]
    dtype: torch.dtype
    together: int  # tokens that the group has
    drops: bool
    losses: dict[str, tuple[Tensor, Tensor]]
    load: Tensor
    dropped: Tensor | None
    shared: Tensor | None = None


class MoELayer(nn.Module):
    """Route each token to some experts, and sum their results with the router's weights.

    Tokens are split over tp along dim 1 under sequence parallelism. Without it every rank of tp has
    all of them: each routes a part, backward gathers gradients, and the results are gathered, so no
    expert computes a token twice. What a dispatcher sends is said there.

    Router, latent projections and the gate of the shared expert are whole on each rank; their
    gradients are partial sums over tp, which their records say.

    Args:
        hidden_size: Of tokens.
        ffn_size: Width of each expert.
        num_experts: How many there are in all.
        options: See `MoEOptions`.
        groups: Who has which experts and tokens; None is one rank.
        sequence_parallel: Whether the input is a sequence shard.
        seed: Of the router's jitter.
        name: Of the layer, likewise.
        dtype: Of the parameters.
        device: Likewise; `"meta"` draws no values.

    Shape:
        forward: [B, S, hidden] (S / tp under sequence parallelism) or [T, hidden] -> the same.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Sizes do not fit each other or the groups.
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
        for what, size in (
            ("hidden_size", hidden_size),
            ("ffn_size", ffn_size),
            ("num_experts", num_experts),
        ):
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
        how: dict[str, Any] = {"dtype": dtype, "device": device}
        self.router = Router(
            *(hidden_size, num_experts, options.router),
            **{"group": groups.tokens, "step_group": groups.step, "partial_grad": partial},
            **{"seed": seed, "name": name, **how},
        )
        inner = hidden_size if options.latent_size is None else options.latent_size
        self.experts = Experts(inner, ffn_size, num_experts, options.experts, groups=groups, **how)
        self.shared: SharedExpert | None = None
        if options.shared_size:
            self.shared = SharedExpert(
                *(hidden_size, options.shared_size, options.experts),
                gated_output=options.shared_gate,
                tp=groups.tp,
                sequence_parallel=self.sequence_parallel,
                **how,
            )
        self.to_latent: ColumnParallelLinear | None = None
        self.from_latent: ColumnParallelLinear | None = None
        if options.latent_size is not None:
            self.to_latent = _whole_linear(hidden_size, inner, partial, how)
            self.from_latent = _whole_linear(inner, hidden_size, partial, how)
        self.dispatcher = make_dispatcher(options.dispatcher, num_experts, groups)
        self._agreement = Agreement(groups.experts, groups.tokens)
        told = set(_ranks(groups.tokens)) <= set(_ranks(groups.experts))  # by the dispatcher
        self._tells = group_size(groups.tokens) > 1 and not told

    def forward(
        self, x: Tensor, *, valid: Tensor | None = None, token_index: Tensor | None = None
    ) -> MoEOutput:
        """Apply the layer.

        Args:
            x: Hidden states.
            valid: True for real tokens; others are sent nowhere and count nowhere, and get the
                shared expert's result alone. None is all.
            token_index: A number for each token that it has in no other layout or micro-batch, for
                jitter and for which token comes first at an expert that is full.

        Shape:
            x: see the class; valid, token_index: x without its last dim.

        Raises:
            TypeError: `x` is no floating tensor.
            ValueError: Shapes do not fit.
            RoutingError: A router's weights are not finite.
        """
        if not torch.compiler.is_compiling():
            begun = self.begin(x, valid=valid, token_index=token_index)
            return self.finish(self.compute(begun))
        tokens, end = self._route(x, valid, token_index)
        sent = self.dispatcher.dispatch(*tokens, drops=end.drops)
        end = end._replace(shared=None if self.shared is None else self.shared(x))
        y = self.dispatcher.combine(self._computed(sent, end), sent.handle)
        return self._ended(y, end)

    def begin(
        self, x: Tensor, *, valid: Tensor | None = None, token_index: Tensor | None = None
    ) -> tuple[Travelling, Any]:
        """Route tokens and start to send them; the shared expert computes meanwhile.

        `begin`, `compute` and `finish` are `forward` in three parts. What one returns the next is
        given; gradients flow between them through the tensors in it alone. Work done between two of
        them is done while tokens travel.
        """
        tokens, end = self._route(x, valid, token_index)
        travelling = self.dispatcher.start_dispatch(*tokens, drops=end.drops)
        shared = None if self.shared is None else self.shared(x)
        return travelling, end._replace(shared=shared)

    def compute(self, begun: tuple[Travelling, Any]) -> tuple[Travelling, Any]:
        """Wait for this rank's experts' tokens, compute, and start to send the results back."""
        travelling, end = begun
        sent = self.dispatcher.finish_dispatch(travelling)
        return self.dispatcher.start_combine(self._computed(sent, end), sent.handle), end

    def finish(self, computed: tuple[Travelling, Any]) -> MoEOutput:
        """Wait for the results."""
        travelling, end = computed
        return self._ended(self.dispatcher.finish_combine(travelling), end)

    def _route(
        self, x: Tensor, valid: Tensor | None, token_index: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], _End]:
        """Return this rank's tokens, their experts and weights, and what is needed in the end."""
        _check_input(x, valid, token_index)
        self._agree(x)
        alone = self.groups.tp is None or self.sequence_parallel
        ranks, sharing = group_size(self.groups.tokens), 1 if alone else group_size(self.groups.tp)
        together = -(-x.shape[:-1].numel() * ranks // sharing)
        own = x if x.dim() == SEQUENCE_DIM + 2 else x.unsqueeze(0)
        valid, token_index = (
            None if each is None else each.reshape(own.shape[:2]) for each in (valid, token_index)
        )
        if not alone:
            own, valid, token_index = _share(own, valid, token_index, group=self.groups.tp)
        routed = self.router(own, valid=valid, token_index=token_index)
        weights, chosen, dropped = self._limit(routed, token_index, together)
        if self._tells:
            weights = outside_graph(_told)(weights, self.groups.tokens)
        inner = own if self.to_latent is None else self.to_latent(own)
        tokens = inner.flatten(0, 1), chosen, weights
        end = _End(
            shape=x.shape,
            own=own.shape[:2],
            dtype=x.dtype,
            together=together,
            drops=valid is not None or self._capacity is not None,
            losses={name: (loss.sum, loss.count) for name, loss in routed.losses.items()},
            load=count_choices(routed.experts, self.num_experts + 1)[:-1],  # the last is none
            dropped=dropped,
        )
        return _scaled(*tokens) if self.options.scale_input else tokens, end

    def _computed(self, sent: Sent, end: _End) -> Tensor:
        """Apply this rank's experts to what arrived."""
        slots = self._slots(end.together, sent.most)
        return self.experts(sent.rows, sent.counts, exact=sent.exact, slots=slots)

    def _ended(self, y: Tensor, end: _End) -> MoEOutput:
        """Return the layer's output, from the sums over each token's experts."""
        if self.options.scale_input:
            y = y.unflatten(0, (-1, self.options.router.top_k)).sum(1)
        y = y.unflatten(0, end.own)
        y = (y if self.from_latent is None else self.from_latent(y)).to(end.dtype)
        if self.groups.tp is not None and not self.sequence_parallel:
            y = gather_from_group(y, self.groups.tp, dim=SEQUENCE_DIM)
            y = y.narrow(SEQUENCE_DIM, 0, end.shape[-2])
        y = y.reshape(end.shape)
        hidden = y if end.shared is None else y + end.shared
        losses = {name: LossSum(*each) for name, each in end.losses.items()}
        return MoEOutput(hidden, losses, end.load, end.dropped)

    def _agree(self, x: Tensor) -> None:
        """Have the ranks compare their settings, once."""
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
        """That of a step of training: what a token becomes must not hang on other requests."""
        return self.options.capacity if self.training else None

    def _limit(
        self, routed: Routed, token_index: Tensor | None, together: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Take away the choices that are beyond the experts' capacity."""
        weights, experts, _ = routed
        if self._capacity is None:
            return weights, experts, None
        kept = kept_choices(
            *(weights, experts, self.num_experts, self._capacity),
            group=self.groups.tokens,
            token_index=token_index,
            together=together,
        )
        dropped = (~kept & (experts < self.num_experts)).sum()
        return (
            weights.masked_fill(~kept, 0),
            experts.masked_fill(~kept, self.num_experts),
            dropped,
        )

    def _slots(self, together: int, most: int) -> int | None:
        """Rows of each expert with a padded capacity: of all groups of tokens that send to it.

        Where a group has more tokens than this rank's, its experts can have more: `most`.
        """
        capacity = self._capacity
        if capacity is None or not capacity.pad:
            return None
        own = capacity.of(together, self.options.router.top_k, self.num_experts)
        return max(most, own * self._senders(group_size(self.groups.tokens)))

    def _senders(self, together: int) -> int:
        """How many groups of tokens send to this rank's experts, each up to its own capacity."""
        ranks = set(_ranks(self.groups.experts))
        if self.groups.tokens is None:
            return len(ranks)
        tokens = set(_ranks(self.groups.tokens))
        if tokens >= ranks:
            return 1
        return -(-len(ranks) // together) if tokens <= ranks else len(ranks)


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
    """Make each choice of a token one of its own, which its weight has multiplied.

    The weights that are left are 1, and NaN where they are not finite, which dispatchers look for.

    Shape:
        x: [T, H]; experts, weights: [T, k]. Returns [T * k, H], [T * k, 1] twice.
    """
    rows = (x.unsqueeze(1) * weights.unsqueeze(2)).to(x.dtype).flatten(0, 1)
    ones = weights.detach() * 0 + 1
    return rows, experts.reshape(-1, 1), ones.reshape(-1, 1)


def _told(weights: Tensor, group: Group) -> Tensor:
    """Make the weights NaN on all ranks of a group if they are so on one: all raise, none waits."""
    good = finite(weights).int()
    torch.distributed.all_reduce(good, op=torch.distributed.ReduceOp.MIN, group=group)
    return torch.where(good.bool(), weights, torch.nan)


def _ranks(group: Group) -> list[int]:
    return [0] if group is None else torch.distributed.get_process_group_ranks(group)


def _whole_linear(
    size: int, out: int, partial: tuple[str, ...], how: dict[str, Any]
) -> ColumnParallelLinear:
    """A linear layer that is whole on each rank, for tokens that are split over tp."""
    linear = ColumnParallelLinear(size, out, bias=False, **how)
    shard_param(linear.weight, PartitionSpec(), partial_grad=partial)
    return linear


def _share(
    x: Tensor, valid: Tensor | None, token_index: Tensor | None, *, group: Group
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Keep this rank's part of tokens that all ranks have; fill up with tokens that are none."""
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
