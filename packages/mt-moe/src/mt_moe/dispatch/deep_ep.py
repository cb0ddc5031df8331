"""Dispatch by DeepEP, which sends a token once to each rank with some of its experts."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from mt_fusions import permute, unpermute
from mt_parallel_state import group_size
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_moe.dispatch.dispatcher import DispatchOutput, GroupDispatcher
from mt_moe.dispatch.finite import check_finite
from mt_moe.dispatch.in_flight import InFlight, arrived
from mt_moe.error import RoutingError
from mt_moe.groups import ExpertGroups

PACKAGE, CAPABILITY = "deep_ep", (9, 0)


class _Handle(NamedTuple):
    """What brings the results back.

    Attributes:
        buffer: DeepEP's buffer.
        handle: DeepEP's handle of the dispatch.
        places: Where `permute` put each choice of the rows that arrived.
        weights: Weight of each choice, 0 for experts of other ranks.
    """

    buffer: Any
    handle: Any
    places: Tensor
    weights: Tensor


class DeepEPDispatcher(GroupDispatcher):
    """Sends each token once to each rank with some of its experts, through DeepEP's buffers.

    Forward sends `H` numbers in bf16 per token and rank, and `k` weights and choices; each rank
    sums a token's results with its weights before it sends that sum back. Backward repeats both in
    the other direction. The host waits once, for the counts. Each rank's sum is rounded to bf16;
    the other dispatchers round once per token.

    The buffer is sized by the largest number of tokens of a rank in the first pass.

    Args:
        num_experts: Number of experts on all ranks together.
        groups: The ranks that share them, in order, with each expert on one rank.

    Raises:
        ValueError: The experts don't divide evenly.
    """

    def __init__(self, num_experts: int, groups: ExpertGroups) -> None:
        super().__init__(num_experts, groups)
        self._max_tokens = 0

    def start_dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False
    ) -> InFlight:
        """See `Dispatcher`. It waits for the result: nothing overlaps with it.

        Raises:
            TypeError: Tokens are not bf16.
            RoutingError: There are more tokens than the buffer holds, or ranks differ.
        """
        del drops
        if x.dtype != torch.bfloat16:
            raise TypeError(
                f"DeepEP sends bf16, and the tokens are {x.dtype}; train with training.dtype bf16, "
                "or use the dispatcher all_to_all"
            )
        buffer = self._buffer_for(x, top_k=experts.shape[1])
        none = -1  # DeepEP's index for no expert
        chosen = experts.masked_fill(experts == self.num_experts, none)
        rows, shares, own, handle = _Dispatch.apply(  # pyright: ignore[reportGeneralTypeIssues]
            x, weights.float(), chosen, buffer, self.num_experts
        )
        absent = own == none
        shares = shares.masked_fill(absent, 0)
        check_finite(weights)
        check_finite(shares)
        own = own.masked_fill(absent, self.local_experts)
        local, places, counts = permute(rows, own, self.local_experts + 1)
        number = sum(handle.num_recv_tokens_per_expert_list)
        made = _Handle(buffer, handle, places, shares)
        most = max(handle.num_recv_tokens_per_expert_list)
        return arrived(local[:number], (made, counts[:-1], most))

    def finish_dispatch(self, in_flight: InFlight) -> DispatchOutput:
        """See `Dispatcher`."""
        handle, counts, most = in_flight.handle
        return DispatchOutput(in_flight.edge, counts, handle, max_count=most)

    def start_combine(self, rows: Tensor, handle: _Handle) -> InFlight:
        """See `Dispatcher`. It waits for the result, too."""
        others = handle.places.numel() - len(rows)  # choices of experts on other ranks
        rows = torch.cat([rows, rows.new_zeros(others, rows.shape[1])])
        summed = unpermute(rows, handle.places, handle.weights).to(torch.bfloat16)
        summed = cast("Tensor", _Combine.apply(summed, handle.buffer, handle.handle))
        return arrived(summed, None)

    def finish_combine(self, in_flight: InFlight) -> Tensor:
        """See `Dispatcher`."""
        return in_flight.edge

    def _buffer_for(self, x: Tensor, top_k: int) -> Any:
        """Return the buffer that all layers with these groups share."""
        self._agree(x, top_k=top_k)
        if not self._max_tokens:
            most = torch.tensor(len(x), device=x.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.groups.experts)
            self._max_tokens = int(most)
        if len(x) > self._max_tokens:
            raise RoutingError(
                f"{len(x)} tokens, and DeepEP's buffer has room for {self._max_tokens} of a rank, "
                "the largest number in its first pass; start with the largest batch, or use the "
                "dispatcher all_to_all"
            )
        sizes = self._max_tokens, x.shape[1], top_k
        if sizes not in self.groups.buffers:
            self.groups.buffers[sizes] = import_module(PACKAGE).ElasticBuffer(
                self.groups.experts,
                num_max_tokens_per_rank=self._max_tokens,
                hidden=x.shape[1],
                num_topk=top_k,
            )
        return self.groups.buffers[sizes]


class _Dispatch(torch.autograd.Function):
    """Send tokens and weights to the ranks of their experts; backward sums over these ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, experts: Tensor, buffer: Any, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        kind = import_module(PACKAGE).topk_idx_t
        rows, own, shares, handle, _ = buffer.dispatch(
            x.contiguous(),
            topk_idx=experts.to(kind),
            topk_weights=weights.contiguous(),
            num_experts=num_experts,
        )
        ctx.buffer, ctx.handle = buffer, handle
        own = own.long()
        ctx.mark_non_differentiable(own)
        return rows, shares, own, handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, weights_grad, *_ = grads
        grad_x, grad_weights, _ = ctx.buffer.combine(
            grad.contiguous(), ctx.handle, topk_weights=weights_grad.contiguous()
        )
        return grad_x, grad_weights, None, None, None


class _Combine(torch.autograd.Function):
    """Sum each token over the ranks of its experts; backward sends its gradient to them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffer: Any, handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(rows, handle)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.buffer.dispatch(grads[0].contiguous(), handle=ctx.handle)[0], None, None


def deep_ep_obstacle(num_experts: int, groups: ExpertGroups) -> str | None:
    """Return why DeepEP can't serve these groups, or None where it can."""
    del num_experts
    if groups.etp > 1 or groups.all_places != tuple((r, 0) for r in range(groups.ep)):
        return "it needs each expert whole on one rank (etp=1), in the order of the ranks"
    if group_size(groups.experts) == 1:
        return "one rank has all experts"
    if find_spec(PACKAGE) is None:
        return f"the package {PACKAGE} is not installed; build it from its repository"
    if not torch.cuda.is_available():
        return "it is for CUDA, and there is none"
    if torch.cuda.get_device_capability() < CAPABILITY:
        return "it needs compute capability 9.0"
    return None
