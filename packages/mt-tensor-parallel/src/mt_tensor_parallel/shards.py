"""This rank's part of a whole tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mt_parallel_state import Group, group_rank, group_size, mark_matrix, shard_param, sharding_of
from torch import Tensor, nn

from mt_tensor_parallel.arguments import check_volume


def draw_part(
    shape: tuple[int, ...],
    dim: int,
    fill: Callable[[Tensor], Tensor],
    *,
    group: Group,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> nn.Parameter:
    """Draw a whole tensor on the CPU and keep this rank's part of it; on `"meta"` draw nothing."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    device = torch.get_default_device() if device is None else torch.device(device)
    size = shape[dim] // group_size(group)
    if device.type == "meta":
        local = (*shape[:dim], size, *shape[dim + 1 :])
        return nn.Parameter(torch.empty(local, dtype=dtype, device=device))
    check_volume(shape, "a parameter")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    whole = fill(torch.empty(shape, dtype=wide, device="cpu"))
    part = whole.narrow(dim, group_rank(group) * size, size)
    return nn.Parameter(part.to(dtype=dtype, device=device, copy=True).contiguous())


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
