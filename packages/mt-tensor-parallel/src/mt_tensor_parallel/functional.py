"""Column- and row-parallel linear maps as functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_tensor_parallel.autocast import as_autocast, check_dtypes
from mt_tensor_parallel.collectives import (
    Group,
    apply_outside_graph,
    group_size,
    shard_size,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from mt_tensor_parallel.gemm import AccumulatingGemm, Gemm, TorchGemm
from mt_tensor_parallel.overlap import (
    SEQUENCE_DIM,
    Overlap,
    Product,
    check_overlap,
    gather_and,
    pick_overlap,
    scatter_after,
)
from mt_tensor_parallel.wgrad import Deferral, GradSink, defer

__all__ = ["SEQUENCE_DIM", "parallel_linear"]


def _bias_grad(grad_y: Tensor, *, needed: bool) -> Tensor | None:
    return grad_y.flatten(0, -2).sum(0) if needed else None


@dataclass(frozen=True, kw_only=True)
class _How:
    """What the three functions below share.

    Attributes:
        weight: As it was given: a parameter, or a view of one, before any cast.
        gemm: Multiplies.
        group: Ranks that split the weight, or None where nothing is sent.
        sequence_parallel: Whether activations outside the split region are sequence shards.
        store: Asked in backward for what takes the weight gradients, or None to compute them.
        sink: Where the weight's gradient is summed, or None for autograd.
        overlap: How gathering and scattering are hidden.
    """

    weight: Tensor
    gemm: Gemm
    group: Group
    sequence_parallel: bool
    store: Callable[[], Deferral | None]
    sink: GradSink | None
    overlap: Overlap

    def save(self, ctx: Any, x: Tensor, weight: Tensor) -> None:
        """Keep the input only where the weight is trained."""
        ctx.how = self
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)

    def wgrad(self, grad_y: Tensor, x: Callable[[], Tensor]) -> Tensor | None:
        """The weight's gradient, or None once it is in the sink or the store."""
        store = self.store()
        if self.sink is not None:
            add = partial(self._add, self.sink, grad_y, x)
            add() if store is None else store.put(add)
        elif store is None:
            return self.gemm.wgrad(grad_y, x())
        else:
            defer(store, self.weight, lambda: self.gemm.wgrad(grad_y, x()))
        return None

    @torch.no_grad()
    def _add(self, sink: GradSink, grad_y: Tensor, x: Callable[[], Tensor]) -> None:
        def write(out: Tensor, accumulate: bool) -> None:  # noqa: FBT001 - GradSink's signature
            if isinstance(self.gemm, AccumulatingGemm):
                self.gemm.wgrad_into(grad_y, x(), out, accumulate=accumulate)
                return
            grad = self.gemm.wgrad(grad_y, x()).view_as(out)
            out.add_(grad) if accumulate else out.copy_(grad)

        sink.add(write)


class _Local(torch.autograd.Function):
    """A linear map on one rank, for a Gemm that is not torch's or a gradient kept from autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        how.save(ctx, x, weight)
        if type(how.gemm) is TorchGemm:
            return F.linear(x, weight, bias)  # rounds once, with the bias, in low precision
        y = how.gemm.forward(x, weight)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        grad_x = ctx.how.gemm.dgrad(grads[0], weight) if need_x else None
        grad_w = ctx.how.wgrad(grads[0], lambda: x) if need_w else None
        return grad_x, grad_w, _bias_grad(grads[0], needed=need_b), None


class _Column(torch.autograd.Function):
    """Input whole (or gathered along the sequence), output features split."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        how.save(ctx, x, weight)  # the shard of x; it is gathered anew for wgrad
        if how.sequence_parallel:
            product = Product(how.gemm, weight)
            y, _ = gather_and(product, x, _group(how), how.overlap, keep=False)
        else:
            y = how.gemm.forward(x, weight)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        how, group, grad_y = ctx.how, _group(ctx.how), grads[0]
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        gather = None
        if how.sequence_parallel and need_w and how.store() is None:
            gather = start_all_gather(x, group, SEQUENCE_DIM)  # runs while dgrad computes

        def whole() -> Tensor:
            if not how.sequence_parallel:
                return x
            return (gather or start_all_gather(x, group, SEQUENCE_DIM)).wait()

        reduce = None
        if need_x:
            grad_x = how.gemm.dgrad(grad_y, weight)
            if how.sequence_parallel:
                reduce = start_reduce_scatter(grad_x, group, SEQUENCE_DIM)
            else:
                reduce = start_all_reduce(grad_x, group)
        # The reduction of dgrad runs while wgrad computes.
        grad_w = how.wgrad(grad_y, whole) if need_w else None
        grad_b = _bias_grad(grad_y, needed=need_b)
        return None if reduce is None else reduce.wait(), grad_w, grad_b, None


class _Row(torch.autograd.Function):
    """Input features split, output summed over the group (and split along the sequence)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        how.save(ctx, x, weight)
        if how.sequence_parallel:
            y = scatter_after(Product(how.gemm, weight), x, _group(how), how.overlap)
        else:
            y = start_all_reduce(how.gemm.forward(x, weight), _group(how)).wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        how = ctx.how
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        grad_b = _bias_grad(grads[0], needed=need_b)
        grad_y, grad_x = grads[0], None
        if how.sequence_parallel and need_x:
            product = Product(how.gemm, weight, is_dgrad=True)
            grad_x, grad_y = gather_and(product, grad_y, _group(how), how.overlap, keep=need_w)
        elif how.sequence_parallel:
            grad_y = start_all_gather(grad_y, _group(how), SEQUENCE_DIM).wait()
        elif need_x:
            grad_x = how.gemm.dgrad(grad_y, weight)
        grad_w = how.wgrad(grad_y, lambda: x) if need_w else None
        return grad_x, grad_w, grad_b, None


def _group(how: _How) -> dist.ProcessGroup:
    return cast("dist.ProcessGroup", how.group)


def parallel_linear(  # noqa: PLR0913 - a layer's settings, by keyword
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    mode: Literal["column", "row"],
    group: Group = None,
    gemm: Gemm | None = None,
    sequence_parallel: bool = False,
    wgrad_store: Callable[[], Deferral | None] | None = None,
    grad_sink: GradSink | None = None,
    overlap: Overlap | None = None,
) -> Tensor:
    """`x @ weight.T + bias` with `weight` split over `group`.

    `mode="column"` splits the output features. Forward sends nothing, backward all-reduces the
    input's gradient while the weight's is computed. With `sequence_parallel` the input is a
    sequence shard: forward all-gathers it, backward gathers it again and reduce-scatters its
    gradient.

    `mode="row"` splits the input features. Forward all-reduces the output, backward sends
    nothing; with `sequence_parallel` forward reduce-scatters along the sequence, backward
    all-gathers. The bias is whole, and is added once, after the reduction.

    Under autocast products and communication are in its dtype, as on one rank; the gradients of
    `x`, `weight` and `bias` have their own dtypes, and a sink gets the weight's.

    Args:
        x: The input.
        weight: This rank's part of the weight.
        bias: Its bias; a part for column, whole for row.
        mode: Which features are split.
        group: `None` means the weight is whole.
        gemm: `None` is `TorchGemm`.
        sequence_parallel: Whether activations outside the split region are split along dim 1.
        wgrad_store: Asked in backward for a `WgradStore` that takes the computation of the
            weight's gradient, or `None` to compute it then. Compiled graphs do not ask. A weight
            that was computed cannot be given one.
        grad_sink: Where the weight's gradient is summed in place of autograd, which then sees
            none. Compiled graphs leave it to autograd.
        overlap: How gathering and scattering along the sequence are hidden behind the products;
            `None` is `pick_overlap`.

    Shape:
        x: [B, S, in] (column) or [B, S, in / ranks] (row); any leading dims without sequence
        parallelism. With it, S is S / ranks for the input of column and the output of row.
        weight: [out / ranks, in] (column) or [out, in / ranks] (row). Returns [B, S, out / ranks]
        (column) or [B, S, out] (row).

    Raises:
        TypeError: `x` and `weight` differ in dtype, outside of autocast.
        ValueError: Unknown mode, fewer than 3 dims under sequence parallelism, a sequence that
            the group does not divide, or an `overlap` that cannot work here.
    """
    if mode not in ("column", "row"):
        raise ValueError(f"mode must be 'column' or 'row', got {mode!r}")
    plain = gemm is None or type(gemm) is TorchGemm
    if plain:
        check_dtypes(x, weight, "x")
    if torch.compiler.is_compiling():
        wgrad_store = grad_sink = None  # a compiled backward makes all gradients at once
    alone = group is None or group.size() == 1
    if alone and wgrad_store is None and grad_sink is None and plain:
        return F.linear(x, weight, bias)  # what TorchGemm computes, with torch's own backward
    if overlap is not None and group is not None and not alone:
        check_overlap(overlap, group, x.device, gemm)
    if sequence_parallel and not alone:
        _check_sequence(x, mode, group)
    how = _How(
        weight=weight,
        gemm=TorchGemm() if gemm is None else gemm,
        group=group,
        sequence_parallel=sequence_parallel,
        store=wgrad_store or (lambda: None),
        sink=grad_sink,
        overlap=overlap
        or pick_overlap(group, sequence_parallel=sequence_parallel, device=x.device, gemm=gemm),
    )
    rows = as_autocast(x if x.dim() > 1 else x.unsqueeze(0))
    operands = rows, as_autocast(weight), None if bias is None else as_autocast(bias)
    if alone:
        y = cast(Tensor, _Local.apply(*operands, how))
    else:
        y = apply_outside_graph(_Column if mode == "column" else _Row, *operands, how)
    return y if x.dim() > 1 else y.squeeze(0)


def _check_sequence(x: Tensor, mode: str, group: Group) -> None:
    if x.dim() < 3:
        raise ValueError(
            f"sequence parallelism splits dim 1 of [B, S, ...], got x of shape {tuple(x.shape)}"
        )
    length = x.shape[SEQUENCE_DIM] * (1 if mode == "row" else group_size(group))
    shard_size(length, group, what="the sequence length")
