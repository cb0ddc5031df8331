"""Dispatch by all-gather: every rank sees all tokens, and takes those of its experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_parallel_state import (
    Group,
    all_gather,
    group_rank,
    group_size,
    outside_graph,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)
from torch import Tensor

from mt_moe.agreement import Agreement
from mt_moe.all_to_all import local_experts_of
from mt_moe.dispatch import Sent, finite, not_finite
from mt_moe.error import RoutingError
from mt_moe.flight import Flight
from mt_moe.groups import ExpertGroups


@dataclass(frozen=True)
class _Taken:
    """Which gathered tokens this rank took, and how many are its own."""

    tokens: Tensor
    weights: Tensor
    gathered: int
    own: int


class AllGatherDispatcher:
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

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False) -> Sent:
        """See `Dispatcher`."""
        return outside_graph(self._dispatch)(x, experts, weights)

    def start(
        self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False
    ) -> Callable[[], Sent]:
        """See `Dispatcher`. Choices and weights are gathered before it returns."""
        self._agreement.check(
            x.device, num_experts=self.num_experts, hidden_size=x.shape[1], dtype=x.dtype
        )
        group, k = self.groups.experts, experts.shape[1]
        missing = self._most_tokens(len(x), finite(weights)) - len(x)
        wait = _gather(F.pad(x, (0, 0, 0, missing)), group)
        shares = all_gather(F.pad(weights, (0, 0, 0, missing)), group, dim=0)
        chosen = F.pad(experts, (0, 0, 0, missing), value=self.num_experts)
        ids = all_gather(chosen, group, dim=0).flatten() - self.groups.place[0] * self.local_experts
        ids = torch.where((ids >= 0) & (ids < self.local_experts), ids, self.local_experts)
        counts = ids.new_zeros(self.local_experts + 1)
        counts = counts.scatter_add_(0, ids, torch.ones_like(ids))[:-1]
        numbers: list[int] = counts.tolist()
        taken = ids.argsort(stable=True)[: sum(numbers)]
        tokens = taken.div(k, rounding_mode="floor")
        own = shares.flatten().index_select(0, taken)

        def finish() -> Sent:
            rows = wait()
            handle = _Taken(tokens, own, len(rows), len(x))
            return Sent(rows.index_select(0, tokens), counts, handle, most=max(numbers))

        return finish

    def _dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> Sent:
        return self.start(x, experts, weights)()

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """See `Dispatcher`. Sums in fp32 (fp64 for fp64), and once more over ranks."""
        return outside_graph(self._combine)(rows, handle)

    def _combine(self, rows: Tensor, taken: _Taken) -> Tensor:
        wide = torch.promote_types(rows.dtype, torch.float32)
        each = rows.to(wide) * taken.weights.to(wide).unsqueeze(1)
        total = each.new_zeros(taken.gathered, rows.shape[1]).index_add(0, taken.tokens, each)
        return reduce_scatter(total.to(rows.dtype), self.groups.experts, dim=0)[: taken.own]

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


def _gather(rows: Tensor, group: Group) -> Callable[[], Tensor]:
    """Begin to gather rows, and to sum their gradients; return what waits."""
    if group is None or group_size(group) == 1:
        return lambda: rows
    there = partial(start_all_gather, group=group, dim=0)
    back = partial(start_reduce_scatter, group=group, dim=0)
    return Flight(rows, there, back).wait
