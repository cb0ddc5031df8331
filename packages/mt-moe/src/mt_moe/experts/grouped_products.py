"""The autograd function of a grouped linear layer, by a kernel or one expert after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from mt_parallel_state import GradSink, WgradStore
from mt_tensor_parallel import Gemm, Operand, Role
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_moe.experts.kernels import GroupedKernel


@dataclass(frozen=True, kw_only=True)
class GroupedContext:
    """The settings of one call of a grouped linear layer.

    Attributes:
        gemms: The strategy of each expert, used by the loop.
        kernel: The kernel; None is the loop.
        weight: The parameter, or a view of it.
        store: Takes deferred weight gradients while it is active; None if there is none.
        sink: Buffer that sums the weight's gradient; None leaves the gradient to autograd.
    """

    gemms: Sequence[Gemm]
    kernel: GroupedKernel | None
    weight: Tensor
    store: WgradStore | None
    sink: GradSink | None


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, context: GroupedContext) -> Tensor:
    """Multiply each row with the weight of its expert, `x @ weight[e].T`.

    Rows after the last expert's have undefined results.

    Args:
        x: Rows, sorted by expert.
        weight: Weights, in the dtype of `x`.
        counts: Number of rows of each expert.
        context: Kernel, strategies and destination of the weight's gradient.

    Shape:
        x: [N, in]; weight: [E, out, in]; counts: [E]. Returns [N, out].
    """
    return cast("Tensor", _Grouped.apply(x, weight, counts, context))


class _Products(Protocol):
    """The three products of one call, with the operands that backward needs."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def saved(self, *, x: bool, weight: bool) -> list[Tensor]: ...
    def restore(self, tensors: Sequence[Tensor], *, x: bool, weight: bool) -> None: ...
    def begin(self, grad: Tensor) -> None: ...
    def dgrad(self) -> Tensor: ...
    def wgrad(self) -> Tensor: ...
    def wgrad_into(self, out: Tensor, *, accumulate: bool) -> None: ...


class _Whole:
    """Products by a kernel, for all experts at once."""

    def __init__(self, kernel: GroupedKernel, counts: Tensor) -> None:
        self.kernel, self.ends = kernel, counts.cumsum(0).int()

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        self.x, self.weight = x, weight
        return self.kernel.forward(x, weight, self.ends)

    def saved(self, *, x: bool, weight: bool) -> list[Tensor]:
        found = [self.x] * x + [self.weight] * weight
        del self.x, self.weight
        return found

    def restore(self, tensors: Sequence[Tensor], *, x: bool, weight: bool) -> None:
        if x:
            self.x = tensors[0]
        if weight:
            self.weight = tensors[-1]

    def begin(self, grad: Tensor) -> None:
        self.grad = grad

    def dgrad(self) -> Tensor:
        return self.kernel.dgrad(self.grad, self.weight, self.ends)

    def wgrad(self) -> Tensor:
        return self.kernel.wgrad(self.grad, self.x, self.ends)

    def wgrad_into(self, out: Tensor, *, accumulate: bool) -> None:
        grad = self.wgrad()
        out.add_(grad) if accumulate else out.copy_(grad)


class _Loop:
    """Products of one expert after the other, by its strategy; idle experts are skipped."""

    def __init__(self, gemms: Sequence[Gemm], counts: Tensor) -> None:
        self.sizes: list[int] = counts.tolist()
        self.served = [e for e, size in enumerate(self.sizes) if size]
        self.gemms = [gemms[e] for e in self.served]
        self.idle = [gemm for gemm, size in zip(gemms, self.sizes, strict=True) if not size]

    def _operands(self, rows: Tensor, role: Role) -> list[Operand]:
        parts = rows[: sum(self.sizes)].split(self.sizes)
        pairs = zip(self.gemms, self.served, strict=True)
        for gemm in self.idle:
            gemm.skip(role)
        return [gemm.operand(_filled_up(parts[e], gemm.row_multiple), role) for gemm, e in pairs]

    def _join(self, parts: list[Tensor], width: int, like: Tensor) -> Tensor:
        rest = self.rows - sum(self.sizes)
        more = [like.new_zeros(rest, width)] if rest or not parts else []
        own = [part[: self.sizes[e]] for part, e in zip(parts, self.served, strict=True)]
        return torch.cat([*own, *more])

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        (self.rows, self.width), self.shape, self.dtype = x.shape, weight.shape, weight.dtype
        self.x = self._operands(x, "input")
        pairs = zip(self.gemms, self.served, strict=True)
        self.weight: list[Operand] = [gemm.operand(weight[e], "weight") for gemm, e in pairs]
        all_three = zip(self.gemms, self.x, self.weight, strict=True)
        return self._join([gemm.forward(a, b) for gemm, a, b in all_three], self.shape[1], x)

    def saved(self, *, x: bool, weight: bool) -> list[Tensor]:
        chosen = self.x if x else [], self.weight if weight else []
        groups = [[g.saved(o) for g, o in zip(self.gemms, own, strict=False)] for own in chosen]
        self.numbers = [[len(tensors) for tensors in group] for group in groups]
        del self.x, self.weight
        return [tensor for group in groups for tensors in group for tensor in tensors]

    def restore(self, tensors: Sequence[Tensor], *, x: bool, weight: bool) -> None:
        left = iter(tensors)
        own, other = (
            [tuple(next(left) for _ in range(number)) for number in numbers]
            for numbers in self.numbers
        )
        self.x = [g.restored(o, "input") for g, o in zip(self.gemms, own, strict=False)]
        self.weight = [g.restored(o, "weight") for g, o in zip(self.gemms, other, strict=False)]

    def begin(self, grad: Tensor) -> None:
        self.like, self.grad = grad, self._operands(grad, "grad")

    def dgrad(self) -> Tensor:
        all_three = zip(self.gemms, self.grad, self.weight, strict=True)
        parts = [gemm.dgrad(g, w) for gemm, g, w in all_three]
        return self._join(parts, self.width, self.like)

    def wgrad(self) -> Tensor:
        out = self.like.new_zeros(self.shape, dtype=self.dtype)
        for expert, *three in zip(self.served, self.gemms, self.grad, self.x, strict=True):
            gemm, grad, x = three
            out[expert] = gemm.wgrad(grad, x)
        return out

    def wgrad_into(self, out: Tensor, *, accumulate: bool) -> None:
        idle = sorted(set(range(len(out))) - set(self.served))
        if idle and not accumulate:
            out[idle] = 0
        for expert, *three in zip(self.served, self.gemms, self.grad, self.x, strict=True):
            gemm, grad, x = three
            gemm.wgrad_into(grad, x, out[expert], accumulate=accumulate)


def _filled_up(rows: Tensor, multiple: int) -> Tensor:
    missing = -len(rows) % multiple
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, context: GroupedContext
    ) -> Tensor:
        products: _Products = (
            _Loop(context.gemms, counts)
            if context.kernel is None
            else _Whole(context.kernel, counts)
        )
        y = products.forward(x, weight)
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(*products.saved(x=need_w, weight=need_x))
        ctx.products, ctx.context = products, context
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        products: _Products = ctx.products
        need_x, need_w = ctx.needs_input_grad[:2]
        products.restore(ctx.saved_tensors, x=need_w, weight=need_x)
        products.begin(grads[0])
        grad_x = products.dgrad() if need_x else None
        grad_w = _put_wgrad(products, ctx.context) if need_w else None
        return grad_x, grad_w, None, None


def _put_wgrad(products: _Products, context: GroupedContext) -> Tensor | None:
    """Return the weight's gradient, or None if a sink or a store takes it."""
    store = context.store if context.store is not None and context.store.active else None
    if context.sink is not None:
        sink = context.sink

        @torch.no_grad()
        def add() -> None:
            out, accumulate = sink.begin()
            products.wgrad_into(out.flatten(1, -2), accumulate=accumulate)
            sink.end()

        add() if store is None else store.put(add)
        return None
    if store is None:
        return products.wgrad()

    def later() -> None:
        with torch.no_grad():
            grad = products.wgrad()
        context.weight.backward(grad.to(context.weight.dtype))

    store.put(later)
    return None


def as_autocast(x: Tensor) -> Tensor:
    """Cast to the dtype of autocast, where autocast is on; codes of weights stay."""
    device = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not x.is_floating_point():
        return x
    if not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))
