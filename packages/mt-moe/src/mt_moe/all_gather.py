"""Dispatch by all-gather: every rank sees all tokens, and takes those of its experts."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_parallel_state import (
    all_gather,
    group_rank,
    group_size,
    start_all_gather,
    start_reduce_scatter,
)
from torch import Tensor

from mt_moe.agreement import Agreement
from mt_moe.all_to_all import local_experts_of
from mt_moe.dispatch import Dispatcher, Sent, finite, not_finite
from mt_moe.error import RoutingError
from mt_moe.flight import Travelling, depart
from mt_moe.groups import ExpertGroups

_GATHER, _SCATTER = partial(start_all_gather, dim=0), partial(start_reduce_scatter, dim=0)


class _Taken(NamedTuple):
    """Which gathered tokens this rank takes, and how many are its own."""

    tokens: Tensor
    weights: Tensor
    own: int
    gathered: int = 0


class AllGatherDispatcher(Dispatcher):
    """Gathers the tokens of all ranks that share the experts; each takes what its experts serve.

    Forward: an all-gather of tokens, choices and weights; combine: a reduce-scatter. Each moves
    `(ranks - 1) x H` numbers per token, whatever k is: for few ranks, or as many choices as these.
    Ranks with fewer tokens than others pad. The host waits twice: for the ranks' numbers of tokens,
    and for the number of rows taken.

    Args:
        num_experts: How many there are in all.
        groups: The ranks that share them.

    Raises:
        ValueError: The ranks can't share the experts evenly.
    """

    def __init__(self, num_experts: int, groups: ExpertGroups) -> None:
        self.groups, self.num_experts = groups, num_experts
        self.local_experts = local_experts_of(num_experts, groups)
        self._agreement = Agreement(groups.experts)

    def start_dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False
    ) -> Travelling:
        """See `Dispatcher`. Choices and weights are gathered before it returns."""
        del drops
        self._agreement.check(
            x.device, num_experts=self.num_experts, hidden_size=x.shape[1], dtype=x.dtype
        )
        group, k = self.groups.experts, experts.shape[1]
        missing = self._most_tokens(len(x), finite(weights)) - len(x)
        rows = F.pad(x, (0, 0, 0, missing))
        shares = all_gather(F.pad(weights, (0, 0, 0, missing)), group, dim=0)
        chosen = F.pad(experts, (0, 0, 0, missing), value=self.num_experts)
        ids = all_gather(chosen, group, dim=0).flatten() - self.groups.place[0] * self.local_experts
        ids = torch.where((ids >= 0) & (ids < self.local_experts), ids, self.local_experts)
        counts = ids.new_zeros(self.local_experts + 1)
        counts = counts.scatter_add_(0, ids, torch.ones_like(ids))[:-1]
        numbers: list[int] = counts.tolist()
        taken = ids.argsort(stable=True)[: sum(numbers)]
        own = shares.flatten().index_select(0, taken)
        way = _Taken(taken.div(k, rounding_mode="floor"), own, len(x))
        return depart(rows, group, _GATHER, _SCATTER, (way, counts, max(numbers)))

    def finish_dispatch(self, travelling: Travelling) -> Sent:
        """See `Dispatcher`."""
        rows, (way, counts, most) = travelling.land(travelling.edge), travelling.way
        way = way._replace(gathered=len(rows))
        return Sent(rows.index_select(0, way.tokens), counts, way, most=most)

    def start_combine(self, rows: Tensor, handle: _Taken) -> Travelling:
        """See `Dispatcher`. Sums in fp32 (fp64 for fp64), and once more over ranks."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        each = rows.to(wide) * handle.weights.to(wide).unsqueeze(1)
        total = each.new_zeros(handle.gathered, rows.shape[1])
        total = total.index_add(0, handle.tokens, each).to(rows.dtype)
        return depart(total, self.groups.experts, _SCATTER, _GATHER, handle)

    def finish_combine(self, travelling: Travelling) -> Tensor:
        """See `Dispatcher`."""
        return travelling.land(travelling.edge)[: travelling.way.own]

    def _most_tokens(self, tokens: int, good: Tensor) -> int:
        """The largest number of tokens of any rank."""
        group = self.groups.experts
        sizes = torch.zeros(group_size(group), dtype=torch.int64, device=good.device)
        sizes[group_rank(group)] = torch.where(good, tokens, -1)
        if group is not None:
            dist.all_reduce(sizes, group=group)
        found = sizes.tolist()
        if min(found) < 0:
            raise RoutingError(not_finite(f"rank {found.index(-1)} of the experts' group"))
        return max(found)

    def __repr__(self) -> str:
        return f"AllGatherDispatcher({self.num_experts}, ranks={group_size(self.groups.experts)})"
