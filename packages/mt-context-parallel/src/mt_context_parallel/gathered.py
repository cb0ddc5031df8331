"""All-gather attention: every rank gets all keys and values once, as for Llama 3 (2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mt_context_parallel.local import LocalAttention, Partial
from mt_context_parallel.splits import Segment, index_of, on_device

Runs = Sequence[Sequence[Segment]]


def sorted_runs(runs: Runs) -> list[Segment]:
    """All ranks' runs in the order of the sequence, with their places in that order."""
    ordered = sorted((run for part in runs for run in part), key=lambda run: run.start)
    local, result = 0, []
    for run in ordered:
        result.append(run._replace(local=local))
        local += run.length
    return result


def order_of(runs: Runs, device: torch.device) -> Tensor:
    """Where in the ranks' concatenated shards the tokens of `sorted_runs` are."""
    index = torch.cat([index_of(part) for part in runs])
    return on_device(index.argsort(), device)


def _gather(x: Tensor, group: dist.ProcessGroup, order: Tensor) -> Tensor:
    """[B, S, ...] shards to [B, ranks * S, ...] in the order of the sequence."""
    x = x.contiguous()
    out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x, group=group)
    parts = out.view(group.size(), *x.shape).transpose(0, 1).flatten(1, 2)
    return parts.index_select(1, order)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, order: Tensor) -> Tensor:
    """The adjoint of `_gather`."""
    shards = torch.empty_like(x).index_copy_(1, order, x)
    pieces = shards.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    out = torch.empty_like(pieces[0])
    dist.reduce_scatter_tensor(out, pieces.flatten(0, 1), group=group)
    return out


def gathered_forward(
    local: LocalAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    order: Tensor,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp. Keys and values of the whole sequence are held meanwhile.

    Args:
        local: This rank's part; its one shard of keys is the whole sequence.
        q: Queries.
        k: Keys of this rank.
        v: Values of this rank.
        group: The ranks that share the sequence.
        order: From `order_of`.
    """
    partial = Partial(q, v.shape[-1])
    local.forward(partial, q, _gather(k, group, order), _gather(v, group, order), 0)
    return partial.result()


def gathered_backward(
    local: LocalAttention,
    qkv: tuple[Tensor, Tensor, Tensor],
    of_queries: tuple[Tensor, Tensor, Tensor, Tensor],
    group: dist.ProcessGroup,
    order: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; keys are gathered again rather than kept."""
    q, k, v = qkv
    dq = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
    whole = _gather(k, group, order), _gather(v, group, order)
    dkv = local.backward((q, *whole), 0, of_queries, dq)
    if dkv is None:  # a collective follows: the other ranks wait for this one's zeros
        dkv = torch.zeros_like(whole[0], dtype=dq.dtype), torch.zeros_like(whole[1], dtype=dq.dtype)
    dk, dv = (_reduce_scatter(x, group, order) for x in dkv)
    return dq, dk, dv
