"""Ring attention: keys and values are sent round the group while queries stay.

Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mt_context_parallel.local import LocalAttention, Partial


class _Hop:
    """A transfer of one tensor to the next rank, and of another from the previous rank."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup) -> None:
        rank, ranks = group.rank(), group.size()
        self._sent, self._received = x, torch.empty_like(x)  # kept alive until it is sent
        to, source = (rank + 1) % ranks, (rank - 1) % ranks
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=group, group_peer=to),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=source),
            ]
        )

    def wait(self) -> Tensor:
        """Wait for the tensor from the previous rank."""
        for work in self._works:
            work.wait()
        return self._received


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """Return keys and values as one message."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpacked(message: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    first, second = message.split([k.numel(), v.numel()])
    return first.view(k.shape), second.view(v.shape)


def ring_forward(
    local: LocalAttention, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp; the next keys arrive while the present ones are used.

    Args:
        local: This rank's part.
        q: Queries.
        k: Keys of this rank.
        v: Values of this rank.
        group: The ring, in the order of `local.shards`.
    """
    rank, ranks = group.rank(), group.size()
    partial = Partial(q, v.shape[-1])
    message = _packed(k, v)
    for step in range(ranks):
        hop = _Hop(message, group) if step < ranks - 1 else None
        local.forward(partial, q, *_unpacked(message, k, v), (rank - step) % ranks)
        if hop is not None:
            message = hop.wait()
    return partial.result()


def ring_backward(
    local: LocalAttention,
    qkv: tuple[Tensor, Tensor, Tensor],
    of_queries: tuple[Tensor, Tensor, Tensor, Tensor],
    into: tuple[Tensor, Tensor | None],
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Add to the gradients of queries and bias; return the gradients of keys and values.

    Keys go round once more, and their gradients follow one step behind, so that both messages are
    under way while the next tile is computed. After the last hop the gradients are at home.
    """
    q, k, v = qkv
    rank, ranks = group.rank(), group.size()
    message, gradients = _packed(k, v), list[_Hop]()
    for step in range(ranks):
        hop = _Hop(message, group) if step < ranks - 1 else None
        dkv = local.backward(
            (q, *_unpacked(message, k, v)), (rank - step) % ranks, of_queries, into
        )
        gradient = _packed(*dkv)
        if gradients:
            gradient += gradients.pop().wait()
        gradients.append(_Hop(gradient, group))
        if hop is not None:
            message = hop.wait()
    return _unpacked(gradients.pop().wait(), k, v)
