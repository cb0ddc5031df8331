"""All-gather and all-to-all of equal parts, without extra copies on a CPU.

Gloo's collectives copy parts before and after they send them, and its reduce-scatter is an
all-reduce of which every rank keeps a part. Here each part is sent from its memory straight to its
destination.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Messages between all ranks of a group, under way until `wait`.

    Args:
        sent: For each rank, the tensor to send to it.
        received: For each rank, the memory for its tensor; this rank's entry is not written.
        group: The ranks.
    """

    def __init__(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup
    ) -> None:
        ranks, own = group.size(), group.rank()
        self._works: list[dist.Work | None] = []
        for distance in range(1, ranks):  # everybody has another partner at a time
            source, target = (own - distance) % ranks, (own + distance) % ranks
            self._works.append(dist.irecv(received[source], group=group, group_src=source))
            self._works.append(dist.isend(sent[target], group=group, group_dst=target))

    def wait(self) -> None:
        """Wait until all tensors were sent and received."""
        works, self._works = self._works, []
        for work in works:
            if work is not None:
                work.wait()


def start_gather(
    whole: Tensor, part: Tensor, group: dist.ProcessGroup
) -> Exchange | dist.Work | None:
    """Start to gather all ranks' parts in `whole`, in rank order; `part` may be a view of it."""
    if part.device.type != "cpu":
        return dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
    parts = whole.view(group.size(), -1).unbind()
    own = parts[group.rank()]
    if own.data_ptr() != part.data_ptr():
        own.copy_(part)
    return Exchange([own] * group.size(), parts, group)


def start_swap(
    whole: Tensor, group: dist.ProcessGroup
) -> tuple[Exchange | dist.Work | None, list[Tensor]]:
    """Start to send each rank its part of `whole`; return also the parts received from each rank.

    The entry of this rank is its own part, which may be a view of `whole`.
    """
    received = torch.empty_like(whole)
    parts = list(received.view(group.size(), -1).unbind())
    if whole.device.type != "cpu":
        work = dist.all_to_all_single(received, whole, group=group, async_op=True)
        return work, parts
    sent = whole.view(group.size(), -1).unbind()
    work = Exchange(sent, parts, group)
    parts[group.rank()] = sent[group.rank()]
    return work, parts
