"""Collectives that autograd understands. Each one's backward is its adjoint.

Every function takes a process group; `None` (and a group of one rank) means "not split": the
input comes back unchanged and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from mt_files import multiples_near
from torch import Tensor

Group = dist.ProcessGroup | None
Map = Callable[[Tensor], Tensor]
T = TypeVar("T")


def group_size(group: Group) -> int:
    """The number of ranks of `group`; 1 for `None`.

    Raises:
        TypeError: It is something else, such as what `dist.new_group` gives to ranks outside.
    """
    if group is None:
        return 1
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a process group that this rank is in, or None, got {group!r}"
        )
    return group.size()


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
        raise ValueError(
            f"{what} is {size}, which the {ranks} ranks of the group do not divide; "
            f"the nearest sizes that work are {multiples_near(size, ranks)}"
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


def start_all_to_all_rows(
    x: Tensor, group: dist.ProcessGroup, inputs: list[int], outputs: list[int]
) -> Pending:
    """Send `inputs` rows of `x` to each rank, and receive `outputs` of each."""
    x, received = x.contiguous(), x.new_empty((sum(outputs), *x.shape[1:]))
    work = dist.all_to_all_single(received, x, outputs, inputs, group=group, async_op=True)

    def finish(rows: Tensor) -> Tensor:
        nonlocal x
        x = rows  # what was sent is held until here
        return rows

    return Pending(cast(dist.Work, work), received, finish)


def gather_rows(x: Tensor, group: dist.ProcessGroup, counts: Sequence[int]) -> Tensor:
    """Return the rows of all ranks in their order: an all-gather of padded rows, without gradients.

    Args:
        x: This rank's rows.
        group: The ranks.
        counts: Number of rows of each rank.
    """
    most = max(counts)
    if not most:
        return x
    own = x.new_zeros((most, *x.shape[1:]))
    own[: len(x)] = x
    found = start_all_gather(own, group, 0).wait().split(most)
    return torch.cat([rows[:count] for rows, count in zip(found, counts, strict=True)])


class _Linear(torch.autograd.Function):
    """A linear map, given with its adjoint, which is its backward.

    The adjoint is one of the public functions below, so that the pairs can be differentiated any
    number of times.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Map, adjoint: Map) -> Tensor:
        ctx.adjoint = adjoint
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.adjoint(grads[0]), None, None


def _copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return start_all_reduce(x.clone(memory_format=torch.contiguous_format), group).wait()


def _gather(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return start_all_gather(x, group, dim).wait()


def _own_piece(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    local = shard_size(x.shape[dim], group, what=f"dim {dim} of shape {tuple(x.shape)}")
    return x.narrow(dim, group.rank() * local, local).contiguous()


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return start_reduce_scatter(x, group, dim).wait()


def _swap(x: Tensor, group: dist.ProcessGroup, split_dim: int, concat_dim: int) -> Tensor:
    local = shard_size(x.shape[split_dim], group, what=f"dim {split_dim} of {tuple(x.shape)}")
    pieces = x.unflatten(split_dim, (group.size(), local)).movedim(split_dim, 0).contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received.flatten(0, 1), pieces.flatten(0, 1), group=group)
    return received.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)


def outside_graph(function: Callable[..., T]) -> Callable[..., T]:
    """Return the function; a graph of `torch.compile` breaks around its call, which is not traced.

    Example:
        >>> outside_graph(abs)(-1)
        1
    """
    if torch.compiler.is_compiling():  # not a decorator: that would import dynamo with this module
        return cast("Callable[..., T]", torch.compiler.disable(function))
    return function


def apply_outside_graph(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Apply a function that communicates; a graph of `torch.compile` breaks around it.

    Dynamo fails on some functions that hold a group (torch 2.15), and computes zero gradients
    for others (torch 2.11).
    """
    return outside_graph(_apply)(function, *arguments)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    return cast(Tensor, function.apply(*arguments))


def _pair(
    x: Tensor,
    group: Group,
    run: Callable[..., Tensor],
    adjoint: Callable[..., Tensor],
    **options: int,
) -> Tensor:
    """Apply one of a pair of maps that take the same options; on one rank both change nothing."""
    if group_size(group) == 1:
        return x
    maps = (partial(each, group=group, **options) for each in (run, adjoint))
    return apply_outside_graph(_Linear, x, *maps)


def _dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim {dim} is out of range for a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Enter a split region with a replicated tensor: identity, backward all-reduce SUM.

    Shape:
        x: any, equal on all ranks. Returns the same.
    """
    return _pair(x, group, _copy, reduce_from_group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Leave a split region with partial sums: all-reduce SUM, backward identity.

    Shape:
        x: any, a partial sum on each rank. Returns the sum, equal on all ranks.
    """
    return _pair(x, group, _reduce, copy_to_group)


def gather_from_group(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """Make a split tensor whole for replicated work: all-gather, backward keeps the own piece.

    The backward is right where all ranks go on to compute the same thing, so that their output
    gradients are equal; where they do not, use `all_gather`.

    Shape:
        x: [..., n / ranks, ...] at `dim`. Returns [..., n, ...], equal on all ranks.
    """
    return _pair(x, group, _gather, scatter_to_group, dim=_dim(x, dim))


def scatter_to_group(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """Keep this rank's piece of a replicated tensor; backward all-gather.

    Shape:
        x: [..., n, ...] at `dim`, equal on all ranks. Returns [..., n / ranks, ...].

    Raises:
        ValueError: The group does not divide the dim.
    """
    return _pair(x, group, _own_piece, gather_from_group, dim=_dim(x, dim))


def all_gather(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """Make a split tensor whole for split work: all-gather, backward reduce-scatter SUM.

    Shape:
        x: [..., n / ranks, ...] at `dim`. Returns [..., n, ...], equal on all ranks.
    """
    return _pair(x, group, _gather, reduce_scatter, dim=_dim(x, dim))


def reduce_scatter(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """Sum partial results and keep this rank's piece: reduce-scatter SUM, backward all-gather.

    Shape:
        x: [..., n, ...] at `dim`, a partial sum on each rank. Returns [..., n / ranks, ...].

    Raises:
        ValueError: The group does not divide the dim.
    """
    return _pair(x, group, _reduce_scatter, all_gather, dim=_dim(x, dim))


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
    if group is None or group_size(group) == 1:
        return x
    run = partial(_swap, group=group, split_dim=dims[0], concat_dim=dims[1])
    back = partial(all_to_all, group=group, split_dim=dims[1], concat_dim=dims[0])
    return apply_outside_graph(_Linear, x, run, back)
