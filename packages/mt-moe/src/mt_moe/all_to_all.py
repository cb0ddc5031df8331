"""Dispatch by all-to-all: each token goes to the ranks of its experts only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mt_fusions import permute, unpermute
from mt_parallel_state import (
    Group,
    all_to_all_rows,
    group_size,
    outside_graph,
    start_all_to_all_rows,
)
from torch import Tensor

from mt_moe.agreement import Agreement
from mt_moe.dispatch import Sent, finite, not_finite
from mt_moe.error import RoutingError
from mt_moe.flight import Flight
from mt_moe.groups import ExpertGroups


@dataclass(frozen=True)
class _Way:
    """How tokens went: what `combine` needs to bring them back."""

    places: Tensor
    weights: Tensor
    sent: list[int]
    received: list[int]
    order: Tensor | None


class AllToAllDispatcher:
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

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False) -> Sent:
        """See `Dispatcher`."""
        return outside_graph(self._dispatch)(x, experts, weights)

    def start(
        self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False
    ) -> Callable[[], Sent]:
        """See `Dispatcher`. Counts are exchanged before it returns."""
        self._agreement.check(
            x.device, num_experts=self.num_experts, hidden_size=x.shape[1], dtype=x.dtype
        )
        self._slots = self._slots.to(experts.device)
        slots = self._slots[experts].flatten(1)
        rows, places, counts = permute(x, slots, self._nowhere + 1)
        sent, received, local = self._exchange(counts[: self._nowhere], finite(weights))
        to, of = ([sum(row) for row in table] for table in (sent, received))
        wait = _send(rows[: sum(to)], self.groups.experts, to, of)
        shares = weights.repeat_interleave(self.groups.etp, 1)
        most = max(map(sum, zip(*received, strict=True)))

        def finish() -> Sent:
            arrived, order = wait(), None
            if self.local_experts > 1:
                ids = torch.arange(self.local_experts, device=x.device).repeat(len(of))
                own = ids.repeat_interleave(local.flatten(), output_size=sum(of)).unsqueeze(1)
                arrived, order, _ = permute(arrived, own, self.local_experts)
            return Sent(arrived, local.sum(0), _Way(places, shares, to, of, order), most=most)

        return finish

    def _dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> Sent:
        return self.start(x, experts, weights)()

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """See `Dispatcher`."""
        return outside_graph(self._combine)(rows, handle)

    def _combine(self, rows: Tensor, way: _Way) -> Tensor:
        if way.order is not None:
            rows = unpermute(rows, way.order)
        back = all_to_all_rows(
            rows, self.groups.experts, input_splits=way.received, output_splits=way.sent
        )
        dropped = way.places.numel() - len(back)
        if dropped:
            back = torch.cat([back, back.new_zeros(dropped, back.shape[1])])
        return unpermute(back, way.places, way.weights)

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


def _send(rows: Tensor, group: Group, to: list[int], of: list[int]) -> Callable[[], Tensor]:
    """Begin to send rows, and their gradients back; return what waits."""
    if group is None or group_size(group) == 1:
        return lambda: rows
    there = partial(start_all_to_all_rows, group=group, inputs=to, outputs=of)
    back = partial(start_all_to_all_rows, group=group, inputs=of, outputs=to)
    return Flight(rows, there, back).wait


def local_experts_of(num_experts: int, groups: ExpertGroups) -> int:
    """Return how many experts a rank has, or raise ValueError where they are not even."""
    if num_experts % groups.ep or num_experts < 1:
        raise ValueError(
            f"num_experts={num_experts} can't be dealt evenly to ep={groups.ep} ranks; use a "
            f"multiple of {groups.ep}"
        )
    return num_experts // groups.ep
