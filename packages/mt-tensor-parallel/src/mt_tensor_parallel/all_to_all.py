"""All-to-all exchanges that autograd understands; the adjoint of each is the reverse exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_tensor_parallel.collectives import Group, apply_outside_graph, shard_size

__all__ = ["all_to_all", "all_to_all_rows", "exchange_kv_groups"]


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, split_dim: int, concat_dim: int
    ) -> Tensor:
        ctx.group, ctx.dims = group, (concat_dim, split_dim)
        ranks = group.size()
        local = shard_size(x.shape[split_dim], group, what=f"dim {split_dim} of {tuple(x.shape)}")
        pieces = x.unflatten(split_dim, (ranks, local)).movedim(split_dim, 0).contiguous()
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received.flatten(0, 1), pieces.flatten(0, 1), group=group)
        return received.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        split_dim, concat_dim = ctx.dims
        grad = all_to_all(grads[0], ctx.group, split_dim=split_dim, concat_dim=concat_dim)
        return grad, None, None, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, inputs: list[int], outputs: list[int]
    ) -> Tensor:
        ctx.group, ctx.splits = group, (outputs, inputs)
        received = x.new_empty((sum(outputs), *x.shape[1:]))
        dist.all_to_all_single(received, x.contiguous(), outputs, inputs, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs, outputs = ctx.splits
        grad = all_to_all_rows(grads[0], ctx.group, input_splits=inputs, output_splits=outputs)
        return grad, None, None, None


def all_to_all(x: Tensor, group: Group, *, split_dim: int, concat_dim: int) -> Tensor:
    """Move the split from one dim to another: all-to-all, backward the reverse all-to-all.

    Rank j gets piece j of every rank's `split_dim`; the pieces are joined along `concat_dim`.
    With the sequence as `concat_dim` and the hidden or head dim as `split_dim` a sequence shard
    becomes a hidden shard, and the other way round.

    Shape:
        x: [..., n, ..., m, ...] with n at `split_dim` and m at `concat_dim`. Returns the same
        with n / ranks and m * ranks.

    Raises:
        ValueError: The group does not divide `split_dim`, or a dim is out of range or both are
            the same.
    """
    dims = [dim + x.dim() if dim < 0 else dim for dim in (split_dim, concat_dim)]
    if not all(0 <= dim < x.dim() for dim in dims) or dims[0] == dims[1]:
        raise ValueError(
            f"split_dim={split_dim} and concat_dim={concat_dim} must be two different dims of a "
            f"tensor of shape {tuple(x.shape)}"
        )
    if group is None or group.size() == 1:
        return x
    return apply_outside_graph(_Swap, x, group, *dims)


def all_to_all_rows(
    x: Tensor, group: Group, *, input_splits: Sequence[int], output_splits: Sequence[int]
) -> Tensor:
    """Send a given number of rows to each rank: uneven all-to-all, backward the reverse.

    Args:
        x: Rows for rank 0, then for rank 1, and so on.
        group: `None` means one rank.
        input_splits: Rows for each rank.
        output_splits: Rows from each rank.

    Shape:
        x: [sum(input_splits), ...]. Returns [sum(output_splits), ...].

    Raises:
        ValueError: The splits do not fit `x` or the number of ranks.
    """
    ranks = 1 if group is None else group.size()
    inputs, outputs = list(input_splits), list(output_splits)
    if len(inputs) != ranks or len(outputs) != ranks or min([*inputs, *outputs]) < 0:
        raise ValueError(
            f"input_splits={inputs} and output_splits={outputs} must be {ranks} sizes of 0 or more "
            "each, one per rank of the group"
        )
    if sum(inputs) != x.shape[0]:
        raise ValueError(
            f"input_splits={inputs} sum to {sum(inputs)}, but x of shape {tuple(x.shape)} has "
            f"{x.shape[0]} rows"
        )
    if group is None or ranks == 1:
        if inputs != outputs:
            raise ValueError(
                f"input_splits={inputs} and output_splits={outputs} must be equal on one rank, "
                "which receives what it sends"
            )
        return x
    return apply_outside_graph(_Rows, x, group, inputs, outputs)


def exchange_kv_groups(qkv: Tensor, group: Group) -> Tensor:
    """Turn a split of `head_dim` into a split of the query heads, each with its key and value.

    With more ranks than key/value groups a fused projection cannot be cut between groups. Cut along
    `head_dim` instead (`shard_dim=2`), its weight is still a plain box per rank, no row of it
    is on two ranks, and this exchange hands every rank its query heads with the key and value head
    that they share. One all-to-all forward and one backward; the gradients of a key or value head
    that several ranks use are summed on the way back. Each rank sends and receives
    `tokens * (queries per rank + 2) * head_dim` elements.

    Shape:
        qkv: [B, S, G, Q + 2, D / ranks]; in a group the Q queries come first, then the key, then
        the value. Returns [B, S, 1, Q * G / ranks + 2, D]: rank t has the queries t * Q * G / ranks
        and following, counted over all groups.

    Raises:
        ValueError: The ranks are not a multiple of the groups, or do not divide the query heads.
    """
    if group is None or group.size() == 1:
        return qkv
    ranks, groups, queries = group.size(), qkv.shape[2], qkv.shape[3] - 2
    sharing, rest = divmod(ranks, groups)
    if rest or queries % sharing:
        raise ValueError(
            f"{groups} key/value groups of {queries} query heads do not fit {ranks} ranks; "
            f"use a multiple of {groups} ranks that divides {groups * queries}"
        )
    own, shared = qkv.split((queries, 2), dim=3)
    own = own.unflatten(3, (sharing, queries // sharing))
    shared = shared.unsqueeze(3).expand(-1, -1, -1, sharing, -1, -1)
    per_rank = torch.cat((own, shared), dim=4).flatten(2, 3)
    return all_to_all(per_rank, group, split_dim=2, concat_dim=-1)
