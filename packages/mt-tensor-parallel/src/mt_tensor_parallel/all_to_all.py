"""All-to-all exchanges that autograd understands; the adjoint of each is the reverse exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mt_tensor_parallel.collectives import Group, shard_size

__all__ = ["all_to_all", "all_to_all_rows"]


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
    """Moves the split from one dim to another: all-to-all, backward the reverse all-to-all.

    Rank j gets piece j of every rank's ``split_dim``; the pieces are joined along ``concat_dim``.
    With the sequence as ``concat_dim`` and the hidden or head dim as ``split_dim`` a sequence shard
    becomes a hidden shard, and the other way round.

    Shape:
        x: [..., n, ..., m, ...] with n at ``split_dim`` and m at ``concat_dim``. Returns the same
        with n / ranks and m * ranks.

    Raises:
        ValueError: The group does not divide ``split_dim``, or a dim is out of range or both are
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
    return cast(Tensor, _Swap.apply(x, group, *dims))


def all_to_all_rows(
    x: Tensor, group: Group, *, input_splits: Sequence[int], output_splits: Sequence[int]
) -> Tensor:
    """Sends a given number of rows to each rank: uneven all-to-all, backward the reverse.

    Args:
        x: Rows for rank 0, then for rank 1, and so on.
        group: ``None`` means one rank.
        input_splits: Rows for each rank.
        output_splits: Rows from each rank.

    Shape:
        x: [sum(input_splits), ...]. Returns [sum(output_splits), ...].

    Raises:
        ValueError: The splits do not fit ``x`` or the number of ranks.
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
        return x
    return cast(Tensor, _Rows.apply(x, group, inputs, outputs))
