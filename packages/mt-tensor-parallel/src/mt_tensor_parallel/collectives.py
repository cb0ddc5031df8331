"""Collectives that autograd understands. Each one's backward is its adjoint.

Every function takes a process group; `None` (and a group of one rank) means "not split": the
input comes back unchanged and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "all_gather",
    "apply_outside_graph",
    "copy_to_group",
    "gather_from_group",
    "group_rank",
    "group_size",
    "reduce_from_group",
    "reduce_scatter",
    "scatter_to_group",
]

Group = dist.ProcessGroup | None


def group_size(group: Group) -> int:
    """The number of ranks of `group`; 1 for `None`."""
    return 1 if group is None else group.size()


def group_rank(group: Group) -> int:
    """This rank's index in `group`; 0 for `None`."""
    return 0 if group is None else group.rank()


def shard_size(size: int, group: Group, *, what: str) -> int:
    """`size` divided by the group's size.

    Raises:
        ValueError: It is 0 or does not divide; the message has both numbers and the nearest valid
            ones.
    """
    ranks = group_size(group)
    if size < 1:
        raise ValueError(
            f"{what} is {size}; the nearest size that {ranks} ranks can share is {ranks}"
        )
    if size % ranks:
        below = size // ranks * ranks
        nearest = " or ".join(str(n) for n in (below, below + ranks) if n > 0)
        raise ValueError(
            f"{what} is {size}, which the {ranks} ranks of the group do not divide; "
            f"the nearest sizes that work are {nearest}"
        )
    return size // ranks


class Pending:
    """A collective under way; `wait` gives its result."""

    def __init__(
        self, work: dist.Work, result: Tensor, finish: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._work, self._result, self._finish = work, result, finish

    def wait(self) -> Tensor:
        """Block (the current stream, on CUDA) until the result is there, and return it."""
        self._work.wait()
        return self._result if self._finish is None else self._finish(self._result)


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum `x` over the group, in place if it is contiguous."""
    x = x.contiguous()
    return Pending(cast(dist.Work, dist.all_reduce(x, group=group, async_op=True)), x)


def start_all_gather(x: Tensor, group: dist.ProcessGroup, dim: int) -> Pending:
    """Concatenate the ranks' `x` along `dim`."""
    x, ranks = x.contiguous(), group.size()
    # gloo takes the concatenated form only, not the stacked one.
    out = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    work = dist.all_gather_into_tensor(out, x, group=group, async_op=True)

    def finish(parts: Tensor) -> Tensor:
        return parts.view(ranks, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    return Pending(cast(dist.Work, work), out, finish)


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int) -> Pending:
    """Sum `x` over the group and keep this rank's piece along `dim`."""
    ranks = group.size()
    local = shard_size(x.shape[dim], group, what=f"dim {dim} of shape {tuple(x.shape)}")
    pieces = x.unflatten(dim, (ranks, local)).movedim(dim, 0).contiguous()
    out = torch.empty_like(pieces[0])
    work = dist.reduce_scatter_tensor(out, pieces.flatten(0, 1), group=group, async_op=True)
    return Pending(cast(dist.Work, work), out)


def _own_piece(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    local = shard_size(x.shape[dim], group, what=f"dim {dim} of shape {tuple(x.shape)}")
    return x.narrow(dim, group.rank() * local, local).contiguous()


# In each class below backward calls the adjoint through its public function, so that the pairs can
# be differentiated any number of times.


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return reduce_from_group(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        copy = x.clone(memory_format=torch.contiguous_format)
        return start_all_reduce(copy, group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return copy_to_group(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return start_all_gather(x, group, dim).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return scatter_to_group(grads[0], ctx.group, dim=ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _own_piece(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return gather_from_group(grads[0], ctx.group, dim=ctx.dim), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return start_all_gather(x, group, dim).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return reduce_scatter(grads[0], ctx.group, dim=ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return start_reduce_scatter(x, group, dim).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_gather(grads[0], ctx.group, dim=ctx.dim), None, None


def apply_outside_graph(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Apply a function that communicates; a graph of `torch.compile` breaks around it.

    Dynamo fails on some functions that hold a group (torch 2.15), and computes zero gradients
    for others (torch 2.11).
    """
    apply = _apply
    if torch.compiler.is_compiling():  # not a decorator: that would import dynamo with this module
        apply = cast("Callable[..., Tensor]", torch.compiler.disable(_apply))
    return apply(function, *arguments)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    return cast(Tensor, function.apply(*arguments))


def _alone(group: Group) -> bool:
    return group is None or group.size() == 1


def _dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim {dim} is out of range for a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Enter a split region with a replicated tensor: identity, backward all-reduce SUM.

    Shape:
        x: any, equal on all ranks. Returns the same.
    """
    return x if _alone(group) else apply_outside_graph(_Copy, x, group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Leave a split region with partial sums: all-reduce SUM, backward identity.

    Shape:
        x: any, a partial sum on each rank. Returns the sum, equal on all ranks.
    """
    return x if _alone(group) else apply_outside_graph(_Reduce, x, group)


def gather_from_group(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """Make a split tensor whole for replicated work: all-gather, backward keeps the own piece.

    The backward is right where all ranks go on to compute the same thing, so that their output
    gradients are equal; where they do not, use `all_gather`.

    Shape:
        x: [..., n / ranks, ...] at `dim`. Returns [..., n, ...], equal on all ranks.
    """
    return x if _alone(group) else apply_outside_graph(_Gather, x, group, _dim(x, dim))


def scatter_to_group(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """Keep this rank's piece of a replicated tensor; backward all-gather.

    Shape:
        x: [..., n, ...] at `dim`, equal on all ranks. Returns [..., n / ranks, ...].

    Raises:
        ValueError: The group does not divide the dim.
    """
    return x if _alone(group) else apply_outside_graph(_Scatter, x, group, _dim(x, dim))


def all_gather(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """Make a split tensor whole for split work: all-gather, backward reduce-scatter SUM.

    Shape:
        x: [..., n / ranks, ...] at `dim`. Returns [..., n, ...], equal on all ranks.
    """
    return x if _alone(group) else apply_outside_graph(_AllGather, x, group, _dim(x, dim))


def reduce_scatter(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """Sum partial results and keep this rank's piece: reduce-scatter SUM, backward all-gather.

    Shape:
        x: [..., n, ...] at `dim`, a partial sum on each rank. Returns [..., n / ranks, ...].

    Raises:
        ValueError: The group does not divide the dim.
    """
    return x if _alone(group) else apply_outside_graph(_ReduceScatter, x, group, _dim(x, dim))
