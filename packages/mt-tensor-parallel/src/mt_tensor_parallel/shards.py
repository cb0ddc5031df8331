"""This rank's part of a whole tensor."""

from __future__ import annotations

import torch
from mt_parallel_state import Group, group_rank, group_size, mark_matrix, shard_param, sharding_of
from torch import Tensor, nn


def take_part(own: nn.Parameter, whole: Tensor, group: Group) -> nn.Parameter:
    """Copy the part of `whole` that `own` stands for, with `own`'s sharding record.

    Shape:
        whole: any that has as many elements as all parts together. Returns that of `own`.
    """
    record = sharding_of(own)
    split = [
        dim < len(record.spec.dims) and bool(record.spec.dims[dim]) for dim in range(own.dim())
    ]
    ranks, rank = group_size(group), group_rank(group)
    part = whole.detach().view(
        [n * ranks if s else n for n, s in zip(own.shape, split, strict=True)]
    )
    for dim, size in enumerate(own.shape):
        if split[dim]:
            part = part.narrow(dim, rank * size, size)
    copy = nn.Parameter(
        part.clone(memory_format=torch.contiguous_format), requires_grad=whole.requires_grad
    )
    shard_param(copy, record.spec, partial_grad=record.partial_grad)
    return mark_matrix(copy, record.matrix)
