"""Products of rows with the weights of their experts: kernels, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from mt_files import AUTO, kernel_for
from mt_kernels import triton_obstacle
from mt_parallel_state import GradSink, WgradStore
from mt_tensor_parallel import Gemm, Operand, Role
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, kw_only=True)
class GroupedKernel:
    """One way to multiply rows of several experts at once.

    Attributes:
        name: In messages, and to ask for it.
        forward: Of rows [N, in], weights [E, out, in] and ends [E], returns [N, out].
        dgrad: Of gradients [N, out], weights and ends, returns [N, in].
        wgrad: Of gradients, rows and ends, returns [E, out, in].
        obstacle: Why it can't serve rows and weights; None where it serves.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    dgrad: Callable[[Tensor, Tensor, Tensor], Tensor]
    wgrad: Callable[[Tensor, Tensor, Tensor], Tensor]
    obstacle: Callable[[Tensor, Tensor], str | None]


def _grouped_mm_obstacle(x: Tensor, weight: Tensor) -> str | None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"torch's grouped_mm has no {x.dtype}"
    if weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) < (8, 0):
        return "torch's grouped_mm needs compute capability 8.0"
    unit = 16 // weight.element_size()
    if weight.shape[1] % unit or weight.shape[2] % unit:
        return (
            f"torch's grouped_mm needs sizes that are multiples of {unit} in {weight.dtype}, and "
            f"the weight is {weight.shape[1]} x {weight.shape[2]}"
        )
    return None


def _triton_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    from mt_moe.gpu.grouped_gemm import multiply_rows

    return multiply_rows(x, weight.transpose(1, 2), ends)


def _triton_dgrad(grad: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    from mt_moe.gpu.grouped_gemm import multiply_rows

    return multiply_rows(grad, weight, ends)


def _triton_wgrad(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    from mt_moe.gpu.grouped_gemm import multiply_experts

    return multiply_experts(grad, x, ends)


GROUPED_KERNELS: tuple[GroupedKernel, ...] = (
    GroupedKernel(
        name="grouped_mm",
        forward=lambda x, w, ends: F.grouped_mm(x, w.transpose(1, 2), offs=ends),
        dgrad=lambda grad, w, ends: F.grouped_mm(grad.contiguous(), w, offs=ends),
        wgrad=lambda grad, x, ends: F.grouped_mm(grad.contiguous().t(), x, offs=ends),
        obstacle=_grouped_mm_obstacle,
    ),
    GroupedKernel(
        name="triton",
        forward=_triton_rows,
        dgrad=_triton_dgrad,
        wgrad=_triton_wgrad,
        obstacle=triton_obstacle,
    ),
)
LOOP = "loop"
"""The reference, and what serves any `Gemm`: expert by expert. The host waits for counts."""


@dataclass(frozen=True, kw_only=True)
class How:
    """How a grouped layer computes.

    Attributes:
        gemms: Multiply in the loop, one for each expert.
        kernel: A name of `GROUPED_KERNELS`, "loop", or "auto".
        weight: The parameter, or a view of it.
        store: Takes the weight's gradient while it is active; None for none.
        sink: Where it is summed, or None for autograd.
    """

    gemms: Sequence[Gemm]
    kernel: str
    weight: Tensor
    store: WgradStore | None
    sink: GradSink | None


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, how: How) -> Tensor:
    """Multiply each row with the weight of its expert, `x @ weight[e].T`.

    Rows behind those of all experts have no defined result.

    Shape:
        x: [N, in], sorted by expert; weight: [E, out, in]; counts: [E]. Returns [N, out].

    Raises:
        ValueError: The kernel that was asked for does not serve.
    """
    x, matrix = as_autocast(x), as_autocast(weight)
    return cast("Tensor", _Grouped.apply(x, matrix, counts, how))


def chosen_kernel(how: How, x: Tensor, weight: Tensor) -> GroupedKernel | None:
    """Return what multiplies; None is the loop."""
    others = [gemm for gemm in how.gemms if not gemm.is_autograd]
    if how.kernel == LOOP or (how.kernel == AUTO and others):
        return None
    if others:
        raise ValueError(
            f"kernel {how.kernel!r} has torch's own products, and an expert's strategy is "
            f"{others[0]!r}; use 'auto' or 'loop'"
        )
    if how.kernel == AUTO:
        serving = (k for k in GROUPED_KERNELS if k.obstacle(x, weight) is None)
        return next(serving, None)
    return kernel_for(GROUPED_KERNELS, how.kernel, x, weight)


def grouped_obstacles(x: Tensor, weight: Tensor) -> dict[str, str | None]:
    """Say for each kernel of the grouped product why it can't serve; None if it can.

    Shape:
        x: [N, in]; weight: [E, out, in].
    """
    return {k.name: k.obstacle(x, weight) for k in GROUPED_KERNELS} | {LOOP: None}


class _Products(Protocol):
    """The three products of one call."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def kept(self, *, x: bool, weight: bool) -> list[Tensor]: ...
    def restore(self, tensors: Sequence[Tensor], *, x: bool, weight: bool) -> None: ...
    def begin(self, grad: Tensor) -> None: ...
    def dgrad(self) -> Tensor: ...
    def wgrad(self) -> Tensor: ...
    def wgrad_into(self, out: Tensor, *, accumulate: bool) -> None: ...


class _Whole:
    """By a kernel for all experts at once."""

    def __init__(self, kernel: GroupedKernel, counts: Tensor) -> None:
        self.kernel, self.ends = kernel, counts.cumsum(0).int()

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        self.x, self.weight = x, weight
        return self.kernel.forward(x, weight, self.ends)

    def kept(self, *, x: bool, weight: bool) -> list[Tensor]:
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
    """An expert after the other, by any strategy; experts without rows are left out."""

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
        self.rows, self.shape, self.dtype = len(x), weight.shape, weight.dtype
        self.x = self._operands(x, "input")
        pairs = zip(self.gemms, self.served, strict=True)
        self.weight: list[Operand] = [gemm.operand(weight[e], "weight") for gemm, e in pairs]
        all_three = zip(self.gemms, self.x, self.weight, strict=True)
        return self._join([gemm.forward(a, b) for gemm, a, b in all_three], self.shape[1], x)

    def kept(self, *, x: bool, weight: bool) -> list[Tensor]:
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
        return self._join(parts, self.shape[2], self.like)

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
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, how: How) -> Tensor:
        kernel = chosen_kernel(how, x, weight)
        run: _Products = _Loop(how.gemms, counts) if kernel is None else _Whole(kernel, counts)
        y = run.forward(x, weight)
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(*run.kept(x=need_w, weight=need_x))
        ctx.run, ctx.how = run, how
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        run: _Products = ctx.run
        need_x, need_w = ctx.needs_input_grad[:2]
        run.restore(ctx.saved_tensors, x=need_w, weight=need_x)
        run.begin(grads[0])
        grad_x = run.dgrad() if need_x else None
        grad_w = _put_wgrad(run, ctx.how) if need_w else None
        return grad_x, grad_w, None, None


def _put_wgrad(run: _Products, how: How) -> Tensor | None:
    """Return the weight's gradient, or None once it is in the sink or left to the store."""
    store = how.store if how.store is not None and how.store.active else None
    if how.sink is not None:
        sink = how.sink

        @torch.no_grad()
        def add() -> None:
            out, accumulate = sink.begin()
            run.wgrad_into(out.flatten(1, -2), accumulate=accumulate)
            sink.end()

        add() if store is None else store.put(add)
        return None
    if store is None:
        return run.wgrad()

    def later() -> None:
        with torch.no_grad():
            grad = run.wgrad()
        how.weight.backward(grad.to(how.weight.dtype))

    store.put(later)
    return None


def as_autocast(x: Tensor) -> Tensor:
    """Cast to what autocast multiplies in, where it is on."""
    device = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))
