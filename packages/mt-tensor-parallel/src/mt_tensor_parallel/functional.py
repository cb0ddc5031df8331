"""Column- and row-parallel linear maps as functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_files import check_type
from mt_parallel_state import (
    GradSink,
    Group,
    WgradStore,
    apply_outside_graph,
    group_size,
    shard_size,
    start_all_reduce,
    start_reduce_scatter,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_tensor_parallel.autocast import as_autocast, check_dtypes
from mt_tensor_parallel.gemm import SEQUENCE_DIM, Gemm, Operand, checked_gemm
from mt_tensor_parallel.overlap import (
    Overlap,
    Product,
    check_overlap,
    gather_and,
    pick_overlap,
    scatter_after,
)
from mt_tensor_parallel.wgrad import defer


@dataclass(frozen=True, kw_only=True)
class _How:
    """What the two functions below share.

    Attributes:
        weight: As it was given: a parameter, or a view of one, before any cast.
        gemm: Multiplies.
        group: Ranks that split the weight, or None where nothing is sent.
        sequence_parallel: Whether activations outside the split region are sequence shards.
        store: Takes the weight gradients while it is active; None for none.
        sink: Where the weight's gradient is summed, or None for autograd.
        overlap: How gathering and scattering are hidden.
    """

    weight: Tensor
    gemm: Gemm
    group: Group
    sequence_parallel: bool
    store: WgradStore | None
    sink: GradSink | None
    overlap: Overlap

    @property
    def waits(self) -> bool:
        """Whether the weight's gradient is to be left for later."""
        return self.store is not None and self.store.active

    @property
    def ranks(self) -> dist.ProcessGroup:
        """The group, where something is sent."""
        return cast("dist.ProcessGroup", self.group)

    def save(self, ctx: Any, x: Operand, weight: Operand) -> None:
        """Keep each of the two where the other one gets a gradient."""
        need_x, need_w = ctx.needs_input_grad[:2]
        kept = self.gemm.saved(x) if need_w else ()
        ctx.how, ctx.count = self, len(kept)
        ctx.save_for_backward(*kept, *(self.gemm.saved(weight) if need_x else ()))

    def restore(self, ctx: Any) -> tuple[Operand, Operand]:
        """Return what was kept, None for what was not."""
        tensors = ctx.saved_tensors
        x, weight = tensors[: ctx.count], tensors[ctx.count :]
        return (
            self.gemm.restored(x, "input") if x else None,
            self.gemm.restored(weight, "weight") if weight else None,
        )

    def wgrad(self, grad_y: Operand, x: Callable[[], Operand]) -> Tensor | None:
        """Return the weight's gradient, or None once it is in the sink or the store."""
        store = self.store if self.waits else None
        if self.sink is not None:
            add = partial(self._add, self.sink, grad_y, x)
            add() if store is None else store.put(add)
        elif store is None:
            return self.gemm.wgrad(grad_y, x())
        else:
            defer(store, self.weight, lambda: self.gemm.wgrad(grad_y, x()))
        return None

    @torch.no_grad()
    def _add(self, sink: GradSink, grad_y: Operand, x: Callable[[], Operand]) -> None:
        whole = x()
        out, accumulate = sink.begin()
        self.gemm.wgrad_into(grad_y, whole, out, accumulate=accumulate)
        sink.end()


class _Column(torch.autograd.Function):
    """Input whole (or gathered along the sequence), output features split, or not on one rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        gemm = how.gemm
        own, matrix = gemm.operand(x, "input"), gemm.operand(weight, "weight")
        how.save(ctx, own, matrix)  # the shard of x; it is gathered anew for wgrad
        if not how.sequence_parallel:
            return gemm.forward(own, matrix, bias)
        product = Product(gemm, matrix, bias)
        return gather_and(product, own, how.ranks, how.overlap, keep=False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        how: _How = ctx.how
        (x, weight), gemm = how.restore(ctx), how.gemm
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        arrive = None
        if how.sequence_parallel and need_w and not how.waits:
            arrive = gemm.gather(x, how.ranks)  # runs while dgrad computes

        def whole() -> Operand:
            if not how.sequence_parallel:
                return x
            return (arrive or gemm.gather(x, how.ranks))()

        grad_y = gemm.operand(grads[0], "grad") if need_x or need_w else None
        reduced = None
        if need_x:
            reduced = _start_reduction(gemm.dgrad(grad_y, weight), how)
        # The reduction of dgrad runs while wgrad computes.
        grad_w = how.wgrad(grad_y, whole) if need_w else None
        grad_b = grads[0].flatten(0, -2).sum(0) if need_b else None
        return None if reduced is None else reduced(), grad_w, grad_b, None


def _start_reduction(grad_x: Tensor, how: _How) -> Callable[[], Tensor]:
    if how.group is None:
        return lambda: grad_x
    if how.sequence_parallel:
        return start_reduce_scatter(grad_x, how.group, SEQUENCE_DIM).wait
    return start_all_reduce(grad_x, how.group).wait


class _Row(torch.autograd.Function):
    """Input features split, output summed over the group (and split along the sequence)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        gemm = how.gemm
        own, matrix = gemm.operand(x, "input"), gemm.operand(weight, "weight")
        how.save(ctx, own, matrix)
        if how.sequence_parallel:
            y = scatter_after(Product(gemm, matrix), own, how.ranks, how.overlap)
        else:
            y = start_all_reduce(gemm.forward(own, matrix), how.ranks).wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        how: _How = ctx.how
        (x, weight), gemm = how.restore(ctx), how.gemm
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        grad_b = grads[0].flatten(0, -2).sum(0) if need_b else None
        grad_y = gemm.operand(grads[0], "grad") if need_x or need_w else None
        grad_x = None
        if how.sequence_parallel and need_x:
            product = Product(gemm, weight, is_dgrad=True)
            grad_x, grad_y = gather_and(product, grad_y, how.ranks, how.overlap, keep=need_w)
        elif how.sequence_parallel and need_w:
            grad_y = gemm.gather(grad_y, how.ranks)()
        elif need_x:
            grad_x = gemm.dgrad(grad_y, weight)
        grad_w = how.wgrad(grad_y, lambda: x) if need_w else None
        return grad_x, grad_w, grad_b, None


def parallel_linear(  # noqa: PLR0913 - a layer's settings, by keyword
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    mode: Literal["column", "row"],
    group: Group = None,
    gemm: Gemm | None = None,
    sequence_parallel: bool = False,
    wgrad_store: WgradStore | None = None,
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
        wgrad_store: Takes the computation of the weight's gradient if it is active in backward.
            Compiled graphs do not ask. A weight that was computed cannot wait in one.
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
    gemm = checked_gemm(gemm)
    check_type("x", x, Tensor)
    if gemm.is_torch:
        check_dtypes(x, weight, "x")
    if torch.compiler.is_compiling():
        wgrad_store = grad_sink = None  # a compiled backward makes all gradients at once
    alone = group is None or group_size(group) == 1
    if alone and wgrad_store is None and grad_sink is None and gemm.is_autograd:
        return F.linear(x, weight, bias)
    sequence_parallel = sequence_parallel and not alone
    if overlap is None:
        overlap = pick_overlap(
            group, sequence_parallel=sequence_parallel, device=x.device, gemm=gemm
        )
    elif group is not None and not alone:
        check_overlap(overlap, group, x.device, gemm)
    if sequence_parallel:
        _check_sequence(x, mode, group)
    how = _How(
        weight=weight,
        gemm=gemm,
        group=None if alone else group,
        sequence_parallel=sequence_parallel,
        store=wgrad_store,
        sink=grad_sink,
        overlap=overlap,
    )
    rows = as_autocast(x if x.dim() > 1 else x.unsqueeze(0))
    operands = rows, as_autocast(weight), None if bias is None else as_autocast(bias)
    if alone:
        y = cast(Tensor, _Column.apply(*operands, how))
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
