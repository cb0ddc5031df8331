"""Column- and row-parallel linear maps as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.distributed as dist
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

Mode: TypeAlias = Literal["column", "row"]


@dataclass(frozen=True, kw_only=True)
class LinearContext:
    """The settings with which a layer computes and communicates.

    Attributes:
        weight: The given weight before any cast: a parameter, or a view of one.
        gemm: The strategy of the products.
        group: Ranks that split the weight, or None if nothing is sent.
        sequence_parallel: Whether activations outside the split region are sequence shards.
        store: The store that takes the weight's gradient while it is active, or None.
        sink: The sink that sums the weight's gradient, or None for autograd.
        overlap: How products hide gathering and scattering.
        keeps: Whether a backward may follow, for which operands are kept.
    """

    weight: Tensor
    gemm: Gemm
    group: Group
    sequence_parallel: bool
    store: WgradStore | None
    sink: GradSink | None
    overlap: Overlap
    keeps: bool

    @property
    def waits(self) -> bool:
        """Whether the weight's gradient is left for later."""
        return self.store is not None and self.store.active

    @property
    def ranks(self) -> dist.ProcessGroup:
        """The group of a layer that communicates."""
        return cast("dist.ProcessGroup", self.group)

    def save(self, ctx: Any, x: Operand, weight: Operand) -> None:
        """Keep each of the two operands whose partner gets a gradient."""
        # The context reports needed gradients even under no_grad, where nothing has to be kept.
        need_x, need_w = ctx.needs_input_grad[:2] if self.keeps else (False, False)
        kept = self.gemm.saved(x) if need_w else ()
        ctx.linear, ctx.count = self, len(kept)
        ctx.save_for_backward(*kept, *(self.gemm.saved(weight) if need_x else ()))

    def restore(self, ctx: Any) -> tuple[Operand, Operand]:
        """Return the kept operands, with None for an operand that was not kept."""
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

    def forward(self, mode: Mode, x: Operand, weight: Operand, bias: Tensor | None) -> Tensor:
        """Return the layer's output."""
        if mode == "column":
            if not self.sequence_parallel:
                return self.gemm.forward(x, weight, bias)
            product = Product(self.gemm, weight, bias)
            return gather_and(product, x, self.ranks, self.overlap, keep=False)[0]
        if self.sequence_parallel:
            y = scatter_after(Product(self.gemm, weight), x, self.ranks, self.overlap)
        else:
            y = start_all_reduce(self.gemm.forward(x, weight), self.ranks).wait()
        return y if bias is None else y.add_(bias)

    def backward(
        self, mode: Mode, x: Operand, weight: Operand, grad: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the needed gradients of input, weight and bias, unless a sink takes them.

        Args:
            mode: As in forward.
            x: The input, if the weight needs a gradient.
            weight: The weight, if the input needs a gradient.
            grad: Gradient of the output.
            needs: Whether each of the three needs a gradient.
        """
        need_x, need_w, need_b = needs
        grad_y = self.gemm.operand(grad, "grad") if need_x or need_w else None
        grad_b = grad.flatten(0, -2).sum(0) if need_b else None
        of = self._column_gradients if mode == "column" else self._row_gradients
        return *of(x, weight, grad_y, need_x=need_x, need_w=need_w), grad_b

    def _column_gradients(
        self, x: Operand, weight: Operand, grad_y: Operand, *, need_x: bool, need_w: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        gemm, arrive = self.gemm, None
        if self.sequence_parallel and need_w and not self.waits:
            arrive = gemm.gather(x, self.ranks)  # runs while dgrad computes

        def whole() -> Operand:
            if not self.sequence_parallel:
                return x
            return (arrive or gemm.gather(x, self.ranks))()

        reduced = self._start_reduction(gemm.dgrad(grad_y, weight)) if need_x else None
        # The reduction of dgrad runs while wgrad computes.
        grad_w = self.wgrad(grad_y, whole) if need_w else None
        return None if reduced is None else reduced(), grad_w

    def _start_reduction(self, grad_x: Tensor) -> Callable[[], Tensor]:
        if self.group is None:
            return lambda: grad_x
        if self.sequence_parallel:
            return start_reduce_scatter(grad_x, self.group, SEQUENCE_DIM).wait
        return start_all_reduce(grad_x, self.group).wait

    def _row_gradients(
        self, x: Operand, weight: Operand, grad_y: Operand, *, need_x: bool, need_w: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        grad_x = None
        if self.sequence_parallel and need_x:
            product = Product(self.gemm, weight, is_dgrad=True)
            grad_x, grad_y = gather_and(product, grad_y, self.ranks, self.overlap, keep=need_w)
        elif self.sequence_parallel and need_w:
            grad_y = self.gemm.gather(grad_y, self.ranks)()
        elif need_x:
            grad_x = self.gemm.dgrad(grad_y, weight)
        return grad_x, self.wgrad(grad_y, lambda: x) if need_w else None


class _Linear(torch.autograd.Function):
    """A linear layer on operands."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, context: LinearContext, mode: Mode
    ) -> Tensor:
        own, matrix = context.gemm.operand(x, "input"), context.gemm.operand(weight, "weight")
        context.save(ctx, own, matrix)  # the shard of x, which is gathered again for wgrad
        ctx.mode = mode
        return context.forward(mode, own, matrix, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        context: LinearContext = ctx.linear
        needs = ctx.needs_input_grad[:3]
        return *context.backward(ctx.mode, *context.restore(ctx), grads[0], needs), None, None


def linear_context(
    weight: Tensor,
    *,
    gemm: Gemm,
    group: Group,
    sequence_parallel: bool,
    wgrad_store: WgradStore | None,
    grad_sink: GradSink | None,
    overlap: Overlap | None,
) -> LinearContext:
    """Collect a layer's settings, and pick its overlap if it has none."""
    alone = group is None or group_size(group) == 1
    sequence_parallel = sequence_parallel and not alone
    if overlap is None:
        overlap = pick_overlap(
            group, sequence_parallel=sequence_parallel, device=weight.device, gemm=gemm
        )
    elif group is not None and not alone:
        check_overlap(overlap, group, weight.device, gemm)
    return LinearContext(
        weight=weight,
        gemm=gemm,
        group=None if alone else group,
        sequence_parallel=sequence_parallel,
        store=wgrad_store,
        sink=grad_sink,
        overlap=overlap,
        keeps=torch.is_grad_enabled(),
    )


def parallel_linear(  # noqa: PLR0913 - a layer's settings, by keyword
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    mode: Mode,
    group: Group = None,
    gemm: Gemm | None = None,
    sequence_parallel: bool = False,
    wgrad_store: WgradStore | None = None,
    grad_sink: GradSink | None = None,
    overlap: Overlap | None = None,
) -> Tensor:
    """Compute `x @ weight.T + bias` with `weight` split over `group`.

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
        bias: The bias: this rank's part for column, whole for row.
        mode: Which features are split.
        group: Ranks that split the weight; `None` means that it is whole.
        gemm: The strategy of the products; `None` is `TorchGemm`.
        sequence_parallel: Whether activations outside the split region are split along dim 1.
        wgrad_store: A store that takes the computation of the weight's gradient if it is active in
            backward. Compiled graphs ignore it. It refuses a weight that is not a leaf or its view.
        grad_sink: A sink that sums the weight's gradient instead of autograd. Compiled graphs
            ignore it here; layers such as `ColumnParallelLinear` use store and sink there too.
        overlap: How products hide gathering and scattering along the sequence;
            `None` picks by capability.

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
    alone = group is None or group_size(group) == 1
    if alone and not torch.is_grad_enabled() and getattr(gemm, "is_torch", False):
        check_dtypes(x, weight, "x")  # the other checks take a third of the time of decoding
        return cast("Gemm", gemm).forward(x, weight, bias)
    gemm = checked_gemm(gemm)
    check_type("x", x, Tensor)
    if gemm.is_torch:
        check_dtypes(x, weight, "x")
    if torch.compiler.is_compiling():
        wgrad_store = grad_sink = None  # a compiled backward makes all gradients at once
    if alone and (gemm.is_torch or (gemm.keeps_tensors and _is_plain(x))):
        plain = wgrad_store is None and grad_sink is None and gemm.is_autograd
        # Without gradients nothing is to be kept.
        if plain or not torch.is_grad_enabled():
            return gemm.forward(x, weight, bias)
    sequence_parallel = sequence_parallel and not alone
    if sequence_parallel:
        check_sequence(x, mode, group)
    context = linear_context(
        weight,
        gemm=gemm,
        group=group,
        sequence_parallel=sequence_parallel,
        wgrad_store=wgrad_store,
        grad_sink=grad_sink,
        overlap=overlap,
    )
    rows = as_autocast(x if x.dim() > 1 else x.unsqueeze(0))
    operands = rows, as_autocast(weight), None if bias is None else as_autocast(bias)
    if alone:  # where row and column parallel are the same
        y = cast(Tensor, _Linear.apply(*operands, context, "column"))
    else:
        y = apply_outside_graph(_Linear, *operands, context, mode)
    return y if x.dim() > 1 else y.squeeze(0)


def _is_plain(x: Tensor) -> bool:
    """Whether an input is rows that autocast leaves as they are."""
    return x.dim() > 1 and not torch.is_autocast_enabled(x.device.type)


def check_sequence(x: Tensor, mode: Mode, group: Group) -> None:
    """Raise unless the input has a sequence that the ranks can split equally."""
    if x.dim() < 3:
        raise ValueError(
            f"sequence parallelism splits dim 1 of [B, S, ...], got x of shape {tuple(x.shape)}"
        )
    length = x.shape[SEQUENCE_DIM] * (1 if mode == "row" else group_size(group))
    shard_size(length, group, what="the sequence length")
