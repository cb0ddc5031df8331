"""Dispatch by DeepEP, which sends a token once to each rank that has some of its experts."""

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

from mt_moe.agreement import Agreement
from mt_moe.all_to_all import local_experts_of
from mt_moe.dispatch import Dispatcher, Sent, check_finite
from mt_moe.error import RoutingError
from mt_moe.flight import Travelling, at_once
from mt_moe.groups import ExpertGroups

PACKAGE, CAPABILITY = "deep_ep", (9, 0)


class _Way(NamedTuple):
    """How tokens went: what `combine` needs to bring them back."""

    buffer: Any
    handle: Any
    places: Tensor
    weights: Tensor


class DeepEPDispatcher(Dispatcher):
    """Sends each token once to each rank that has some of its experts, through DeepEP's buffers.

    Forward: `H` numbers in bf16 per token and rank, and `k` weights and choices; each rank sums a
    token's results with its weights before it sends that sum back. Backward does both again, the
    other way. The host waits once, for the counts. Sums over ranks are rounded to bf16, which the
    other dispatchers do once per token.

    The buffer has room for as many tokens as the rank with most has in the first pass.

    Args:
        num_experts: How many there are in all.
        groups: The ranks that share them, in their order, each expert on one.

    Raises:
        ValueError: The ranks can't share the experts evenly.
    """

    def __init__(self, num_experts: int, groups: ExpertGroups) -> None:
        self.groups, self.num_experts = groups, num_experts
        self.local_experts = local_experts_of(num_experts, groups)
        self._agreement, self._room = Agreement(groups.experts), 0

    def start_dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False
    ) -> Travelling:
        """See `Dispatcher`. It waits at once: nothing else runs beside it.

        Raises:
            TypeError: Tokens are not bf16.
            RoutingError: There are more tokens than in the first pass, or ranks differ.
        """
        del drops
        if x.dtype != torch.bfloat16:
            raise TypeError(
                f"DeepEP sends bf16, and the tokens are {x.dtype}; train with training.dtype bf16, "
                "or use the dispatcher all_to_all"
            )
        buffer = self._buffer_for(x, top_k=experts.shape[1])
        none = -1  # in DeepEP's words
        chosen = experts.masked_fill(experts == self.num_experts, none)
        rows, shares, own, handle = _Dispatch.apply(  # pyright: ignore[reportGeneralTypeIssues]
            x, weights.float(), chosen, buffer, self.num_experts
        )
        absent = own == none
        shares = shares.masked_fill(absent, 0)
        check_finite(weights)
        check_finite(shares)
        own = own.masked_fill(absent, self.local_experts)
        arrived, places, counts = permute(rows, own, self.local_experts + 1)
        number = sum(handle.num_recv_tokens_per_expert_list)
        way = _Way(buffer, handle, places, shares)
        most = max(handle.num_recv_tokens_per_expert_list)
        return at_once(arrived[:number], (way, counts[:-1], most))

    def finish_dispatch(self, travelling: Travelling) -> Sent:
        """See `Dispatcher`."""
        way, counts, most = travelling.way
        return Sent(travelling.edge, counts, way, most=most)

    def start_combine(self, rows: Tensor, handle: _Way) -> Travelling:
        """See `Dispatcher`. It waits at once, too."""
        others = handle.places.numel() - len(rows)  # choices of experts that other ranks have
        rows = torch.cat([rows, rows.new_zeros(others, rows.shape[1])])
        summed = unpermute(rows, handle.places, handle.weights).to(torch.bfloat16)
        summed = cast("Tensor", _Combine.apply(summed, handle.buffer, handle.handle))
        return at_once(summed, None)

    def finish_combine(self, travelling: Travelling) -> Tensor:
        """See `Dispatcher`."""
        return travelling.edge

    def _buffer_for(self, x: Tensor, top_k: int) -> Any:
        """Return the buffer that all layers with these groups have in common."""
        self._agreement.check(
            x.device, num_experts=self.num_experts, hidden_size=x.shape[1], top_k=top_k
        )
        if not self._room:
            most = torch.tensor(len(x), device=x.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.groups.experts)
            self._room = int(most)
        if len(x) > self._room:
            raise RoutingError(
                f"{len(x)} tokens, and DeepEP's buffer has room for {self._room} of a rank, the "
                "most of its first pass; begin with the largest batch, or use the dispatcher "
                "all_to_all"
            )
        sizes = self._room, x.shape[1], top_k
        if sizes not in self.groups.buffers:
            self.groups.buffers[sizes] = import_module(PACKAGE).ElasticBuffer(
                self.groups.experts,
                num_max_tokens_per_rank=self._room,
                hidden=x.shape[1],
                num_topk=top_k,
            )
        return self.groups.buffers[sizes]

    def __repr__(self) -> str:
        return f"DeepEPDispatcher({self.num_experts}, ep={self.groups.ep})"


class _Dispatch(torch.autograd.Function):
    """Tokens and weights to the ranks of their experts; backward sums over these ranks."""

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
        grad, of_weights, *_ = grads
        grad_x, grad_weights, _ = ctx.buffer.combine(
            grad.contiguous(), ctx.handle, topk_weights=of_weights.contiguous()
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
    """Say why DeepEP can't serve these groups; None where it serves."""
    del num_experts
    if groups.etp > 1 or groups.all_places != tuple((r, 0) for r in range(groups.ep)):
        return "it needs each expert whole on one rank (etp=1), dealt in the order of the ranks"
    if group_size(groups.experts) == 1:
        return "one rank has all experts"
    if find_spec(PACKAGE) is None:
        return f"the package {PACKAGE} is not installed; build it from its repository"
    if not torch.cuda.is_available():
        return "it is for CUDA, and there is none"
    if torch.cuda.get_device_capability() < CAPABILITY:
        return "it needs compute capability 9.0"
    return None
