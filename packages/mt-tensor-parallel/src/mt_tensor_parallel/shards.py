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
    """Draw a whole tensor on the CPU and return this rank's part; on `"meta"` draw nothing."""
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


def split_dim(param: nn.Parameter) -> int | None:
    """Return the dim in which a parameter is split over the group, or None if it is whole."""
    dims = sharding_of(param).spec.dims
    return next((dim for dim, axes in enumerate(dims) if axes), None)


def take_part(own: nn.Parameter, whole: Tensor, group: Group) -> nn.Parameter:
    """Return a copy of the part of `whole` at the place of `own`, with `own`'s sharding record.

    Shape:
        whole: any shape with the elements of all parts. Returns the shape of `own`.
    """
    record, dim, shape = sharding_of(own), split_dim(own), list(own.shape)
    if dim is not None:
        shape[dim] *= group_size(group)
    part = whole.detach().view(shape)
    if dim is not None:
        part = part.narrow(dim, group_rank(group) * own.shape[dim], own.shape[dim])
    copy = nn.Parameter(
        part.clone(memory_format=torch.contiguous_format), requires_grad=whole.requires_grad
    )
    shard_param(copy, record.spec, partial_grad=record.partial_grad)
    return mark_matrix(copy, record.matrix)
