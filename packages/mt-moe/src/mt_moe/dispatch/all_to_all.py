"""Dispatch by all-to-all: each token goes to the ranks of its experts only."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from mt_fusions import permute, unpermute
from mt_parallel_state import group_size, start_all_to_all_rows
from torch import Tensor

from mt_moe.dispatch.dispatcher import DispatchOutput, GroupDispatcher
from mt_moe.dispatch.finite import finite, not_finite
from mt_moe.dispatch.in_flight import InFlight, Start, launch
from mt_moe.error import RoutingError
from mt_moe.groups import ExpertGroups


class _Handle(NamedTuple):
    """What brings the results back.

    Attributes:
        places: Where `permute` put each choice.
        weights: Weight of each choice, once for each rank of etp.
        sent: Number of rows sent to each rank.
        received: Number of rows received from each rank.
        counts: Rows received for each expert, by the rank that sent them.
        order: How received rows were sorted by expert; None for a single expert.
    """

    places: Tensor
    weights: Tensor
    sent: list[int]
    received: list[int]
    counts: Tensor
    order: Tensor | None = None


class AllToAllDispatcher(GroupDispatcher):
    """Sends a row for each choice of a token to the ranks that share the chosen expert.

    Forward is an all-to-all of counts (8 bytes per expert and rank that shares it) and one of rows:
    `k x etp x H` numbers per token, without those that stay. Combine sends as many back, and
    backward repeats both in the other direction. The host waits once, for the counts.

    If `etp` ranks share each expert, each returns its part of the sum over the expert's width, and
    the token's rank sums the parts with the weights, in fp32.

    Args:
        num_experts: Number of experts on all ranks together.
        groups: The ranks that share them.

    Raises:
        ValueError: The experts don't divide evenly.
    """

    def __init__(self, num_experts: int, groups: ExpertGroups) -> None:
        super().__init__(num_experts, groups)
        # A slot is one expert on one rank, numbered by rank; an expert has a slot for each rank of
        # etp. The slot after the last belongs to choices that mean no expert.
        firsts: list[list[int]] = [[] for _ in range(groups.ep)]
        for rank, (part, _) in enumerate(groups.all_places):
            firsts[part].append(rank * self.local_experts)
        slots = [
            [first + expert % self.local_experts for first in firsts[expert // self.local_experts]]
            for expert in range(num_experts)
        ]
        self._num_slots = group_size(groups.experts) * self.local_experts
        self._slots = torch.tensor([*slots, [self._num_slots] * groups.etp])

    def start_dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False
    ) -> InFlight:
        """See `Dispatcher`. Counts are exchanged before it returns."""
        del drops
        self._agree(x, dtype=x.dtype)
        self._slots = self._slots.to(experts.device)
        slots = self._slots[experts].flatten(1)
        rows, places, counts = permute(x, slots, self._num_slots + 1)
        sent, received, local = self._exchange(counts[: self._num_slots], finite(weights))
        to_rank, from_rank = ([sum(row) for row in table] for table in (sent, received))
        most = max(map(sum, zip(*received, strict=True)))
        handle = _Handle(
            places, weights.repeat_interleave(self.groups.etp, 1), to_rank, from_rank, local
        )
        there, back = _directions(handle)
        return launch(rows[: sum(to_rank)], self.groups.experts, there, back, (handle, most))

    def finish_dispatch(self, in_flight: InFlight) -> DispatchOutput:
        """See `Dispatcher`."""
        rows, (handle, most) = in_flight.rows(), in_flight.handle
        if self.local_experts > 1:  # rows arrive sorted by rank, and by expert within each rank
            ids = torch.arange(self.local_experts, device=rows.device).repeat(len(handle.received))
            own = ids.repeat_interleave(handle.counts.flatten(), output_size=sum(handle.received))
            rows, order, _ = permute(rows, own.unsqueeze(1), self.local_experts)
            handle = handle._replace(order=order)
        return DispatchOutput(rows, handle.counts.sum(0), handle, max_count=most)

    def start_combine(self, rows: Tensor, handle: _Handle) -> InFlight:
        """See `Dispatcher`."""
        if handle.order is not None:
            rows = unpermute(rows, handle.order)
        there, back = _directions(handle)
        return launch(rows, self.groups.experts, back, there, handle)

    def finish_combine(self, in_flight: InFlight) -> Tensor:
        """See `Dispatcher`."""
        rows, handle = in_flight.rows(), in_flight.handle
        dropped = handle.places.numel() - len(rows)
        if dropped:
            rows = torch.cat([rows, rows.new_zeros(dropped, rows.shape[1])])
        return unpermute(rows, handle.places, handle.weights)

    def _exchange(
        self, counts: Tensor, is_finite: Tensor
    ) -> tuple[list[list[int]], list[list[int]], Tensor]:
        """Exchange the number of rows of each expert between all ranks.

        Returns:
            By rank and expert, the rows to send and the rows to receive, and the latter once more
            as a tensor.
        """
        # A rank with weights that are not finite announces it by -1, so that all ranks raise.
        own = torch.where(is_finite, counts, -1)
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


def _directions(handle: _Handle) -> tuple[Start, Start]:
    """Return the all-to-all that sends rows to their experts, and the one that brings them back."""
    sent, received = handle.sent, handle.received
    return (
        partial(start_all_to_all_rows, inputs=sent, outputs=received),
        partial(start_all_to_all_rows, inputs=received, outputs=sent),
    )
