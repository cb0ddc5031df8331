"""Dispatch by all-to-all: each token goes to the ranks of its experts only."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from mt_fusions import permute, unpermute
from mt_parallel_state import group_size, start_all_to_all_rows
from torch import Tensor

from mt_moe.agreement import Agreement
from mt_moe.dispatch import Dispatcher, Sent, finite, not_finite
from mt_moe.error import RoutingError
from mt_moe.flight import Start, Travelling, depart
from mt_moe.groups import ExpertGroups


class _Way(NamedTuple):
    """How tokens go: what brings them back."""

    places: Tensor
    weights: Tensor
    sent: list[int]
    received: list[int]
    local: Tensor  # rows of each of this rank's experts by the rank they come from
    order: Tensor | None = None


class AllToAllDispatcher(Dispatcher):
    """Sends each choice of a token to the ranks that share its expert, each a row.

    Forward: an all-to-all of counts (8 bytes per expert and rank that shares it), and one of rows:
    `k x etp x H` numbers per token, less those that stay. Combine sends as many back; backward
    does both again, the other way. The host waits once, for the counts.

    With `etp` ranks per expert, each returns its part of the sum over the expert's width, and the
    token's rank sums the parts with the weights, in fp32.

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
        slots: list[list[int]] = [[] for _ in range(groups.ep)]
        for rank, (part, _) in enumerate(groups.all_places):
            slots[part].append(rank * self.local_experts)
        firsts = [slots[expert // self.local_experts] for expert in range(num_experts)]
        own = [[f + e % self.local_experts for f in firsts[e]] for e in range(num_experts)]
        self._nowhere = group_size(groups.experts) * self.local_experts
        self._slots = torch.tensor([*own, [self._nowhere] * groups.etp])  # by expert; last: none

    def start_dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False
    ) -> Travelling:
        """See `Dispatcher`. Counts are exchanged before it returns."""
        del drops
        self._agreement.check(
            x.device, num_experts=self.num_experts, hidden_size=x.shape[1], dtype=x.dtype
        )
        self._slots = self._slots.to(experts.device)
        slots = self._slots[experts].flatten(1)
        rows, places, counts = permute(x, slots, self._nowhere + 1)
        sent, received, local = self._exchange(counts[: self._nowhere], finite(weights))
        to, of = ([sum(row) for row in table] for table in (sent, received))
        shares = weights.repeat_interleave(self.groups.etp, 1)
        most = max(map(sum, zip(*received, strict=True)))
        there, back = _ways(to, of)
        way = _Way(places, shares, to, of, local)
        return depart(rows[: sum(to)], self.groups.experts, there, back, (way, most))

    def finish_dispatch(self, travelling: Travelling) -> Sent:
        """See `Dispatcher`."""
        rows, (way, most) = travelling.land(travelling.edge), travelling.way
        if self.local_experts > 1:
            ids = torch.arange(self.local_experts, device=rows.device).repeat(len(way.received))
            own = ids.repeat_interleave(way.local.flatten(), output_size=sum(way.received))
            rows, order, _ = permute(rows, own.unsqueeze(1), self.local_experts)
            way = way._replace(order=order)
        return Sent(rows, way.local.sum(0), way, most=most)

    def start_combine(self, rows: Tensor, handle: _Way) -> Travelling:
        """See `Dispatcher`."""
        if handle.order is not None:
            rows = unpermute(rows, handle.order)
        there, back = _ways(handle.sent, handle.received)
        return depart(rows, self.groups.experts, back, there, handle)

    def finish_combine(self, travelling: Travelling) -> Tensor:
        """See `Dispatcher`."""
        rows, way = travelling.land(travelling.edge), travelling.way
        dropped = way.places.numel() - len(rows)
        if dropped:
            rows = torch.cat([rows, rows.new_zeros(dropped, rows.shape[1])])
        return unpermute(rows, way.places, way.weights)

    def _exchange(
        self, counts: Tensor, good: Tensor
    ) -> tuple[list[list[int]], list[list[int]], Tensor]:
        """Tell each rank how many rows it gets of each expert: by rank, what is sent and comes.

        What comes is returned on the device too. A rank with weights that are not finite says -1,
        so that all of them know.
        """
        own = torch.where(good, counts, -1)
        other = torch.empty_like(own)
        if self.groups.experts is None:
            other.copy_(own)
        else:
            dist.all_to_all_single(other, own, group=self.groups.experts)
        both = torch.stack([own, other]).view(2, -1, self.local_experts).tolist()
        bad = [rank for rank, row in enumerate(both[1]) if row[0] < 0]
        if bad:
            raise RoutingError(not_finite(f"rank {bad[0]} of the experts' group"))
        return both[0], both[1], other.view(-1, self.local_experts)

    def __repr__(self) -> str:
        return f"AllToAllDispatcher({self.num_experts}, ep={self.groups.ep}, etp={self.groups.etp})"


def _ways(sent: list[int], received: list[int]) -> tuple[Start, Start]:
    """What begins to send rows to their experts, and what begins to bring them back."""
    return (
        partial(start_all_to_all_rows, inputs=sent, outputs=received),
        partial(start_all_to_all_rows, inputs=received, outputs=sent),
    )


def local_experts_of(num_experts: int, groups: ExpertGroups) -> int:
    """Return how many experts a rank has, or raise ValueError where they are not even."""
    if num_experts % groups.ep or num_experts < 1:
        raise ValueError(
            f"num_experts={num_experts} can't be dealt evenly to ep={groups.ep} ranks; use a "
            f"multiple of {groups.ep}"
        )
    return num_experts // groups.ep
