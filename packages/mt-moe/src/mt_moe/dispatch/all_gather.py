"""Dispatch by all-gather: every rank gets all tokens and takes its experts' share."""

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

from mt_moe.dispatch.dispatcher import DispatchOutput, GroupDispatcher
from mt_moe.dispatch.finite import finite, not_finite
from mt_moe.dispatch.in_flight import InFlight, launch
from mt_moe.error import RoutingError

_GATHER, _SCATTER = partial(start_all_gather, dim=0), partial(start_reduce_scatter, dim=0)


class _Handle(NamedTuple):
    """The gathered tokens that this rank takes.

    Attributes:
        tokens: Index of the gathered token of each row.
        weights: Weight of each row.
        own: Number of this rank's own tokens.
        gathered: Number of gathered tokens.
    """

    tokens: Tensor
    weights: Tensor
    own: int
    gathered: int = 0


class AllGatherDispatcher(GroupDispatcher):
    """Gathers the tokens of all ranks that share the experts; each rank takes those it serves.

    Forward is an all-gather of tokens, choices and weights, combine a reduce-scatter. Each moves
    `(ranks - 1) x H` numbers per token, whatever k is: use it for few ranks, or when k is near the
    number of ranks. Ranks with fewer tokens than others pad. The host waits twice: for the number
    of tokens of each rank, and for the number of rows taken.

    Args:
        num_experts: Number of experts on all ranks together.
        groups: The ranks that share them.

    Raises:
        ValueError: The experts don't divide evenly.
    """

    def start_dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False
    ) -> InFlight:
        """See `Dispatcher`. Choices and weights are gathered before it returns."""
        del drops
        self._agree(x, dtype=x.dtype)
        group, k = self.groups.experts, experts.shape[1]
        missing = self._max_tokens(len(x), finite(weights)) - len(x)
        rows = F.pad(x, (0, 0, 0, missing))
        gathered_weights = all_gather(F.pad(weights, (0, 0, 0, missing)), group, dim=0)
        chosen = F.pad(experts, (0, 0, 0, missing), value=self.num_experts)
        ids = all_gather(chosen, group, dim=0).flatten() - self.groups.place[0] * self.local_experts
        ids = torch.where((ids >= 0) & (ids < self.local_experts), ids, self.local_experts)
        counts = ids.new_zeros(self.local_experts + 1)
        counts = counts.scatter_add_(0, ids, torch.ones_like(ids))[:-1]
        numbers: list[int] = counts.tolist()
        taken = ids.argsort(stable=True)[: sum(numbers)]
        own = gathered_weights.flatten().index_select(0, taken)
        handle = _Handle(taken.div(k, rounding_mode="floor"), own, len(x))
        return launch(rows, group, _GATHER, _SCATTER, (handle, counts, max(numbers)))

    def finish_dispatch(self, in_flight: InFlight) -> DispatchOutput:
        """See `Dispatcher`."""
        rows, (handle, counts, most) = in_flight.rows(), in_flight.handle
        handle = handle._replace(gathered=len(rows))
        return DispatchOutput(rows.index_select(0, handle.tokens), counts, handle, max_count=most)

    def start_combine(self, rows: Tensor, handle: _Handle) -> InFlight:
        """See `Dispatcher`. Sums in fp32 (fp64 for fp64), then over ranks."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        weighted = rows.to(wide) * handle.weights.to(wide).unsqueeze(1)
        total = weighted.new_zeros(handle.gathered, rows.shape[1])
        total = total.index_add(0, handle.tokens, weighted).to(rows.dtype)
        return launch(total, self.groups.experts, _SCATTER, _GATHER, handle)

    def finish_combine(self, in_flight: InFlight) -> Tensor:
        """See `Dispatcher`."""
        return in_flight.rows()[: in_flight.handle.own]

    def _max_tokens(self, tokens: int, is_finite: Tensor) -> int:
        """Return the largest number of tokens of any rank."""
        group = self.groups.experts
        sizes = torch.zeros(group_size(group), dtype=torch.int64, device=is_finite.device)
        # A rank with weights that are not finite announces it by -1, so that all ranks raise.
        sizes[group_rank(group)] = torch.where(is_finite, tokens, -1)
        if group is not None:
            dist.all_reduce(sizes, group=group)
        found = sizes.tolist()
        if min(found) < 0:
            raise RoutingError(not_finite(f"rank {found.index(-1)} of the experts' group"))
        return max(found)
