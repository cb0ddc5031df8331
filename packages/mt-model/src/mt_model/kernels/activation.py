"""Activations of the feed-forward, with SwiGLU and GeGLU as one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import mt_fusions
import torch
import torch.nn.functional as F
from mt_files import AUTO
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_model.kernels.choice import (
    Kernel,
    KernelChoice,
    choice_of,
    chosen_kernel,
    eager_obstacle,
    fused_drawback,
    fused_obstacle,
    serves,
)
from mt_model.kernels.words import Activation

_QUICK = 1.702


def activate(x: Tensor, kind: str, *, kernel: str = AUTO) -> Tensor:
    """The activation of every element, by its name.

    `silu`; `gelu` (exact, erf); `gelu_tanh`; `gelu_quick`, `x sigmoid(1.702 x)` (Hendrycks and
    Gimpel, 2016); `relu`; or `relu2`, its square (So et al., 2021), which has several kernels.
    """
    match kind:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "gelu_quick":
            return x * torch.sigmoid(_QUICK * x)
        case "relu":
            return F.relu(x)
        case "relu2":
            chosen = chosen_kernel("activation", SQUARED_RELU_KERNELS, kernel, x)
            return chosen.run(x)
    raise ValueError(f"activation {kind!r} is not one of {', '.join(get_args(Activation))}")


def gated_reference(
    gate_up: Tensor, kind: str, *, clamp: float | None = None, up_offset: float = 0.0
) -> Tensor:
    """`activate(gate) * (up + up_offset)` (Shazeer, 2020). The plain form of `gated`.

    With a clamp the gate is cut to at most `clamp` and `up` to between `-clamp` and `clamp` before
    (GPT-OSS).

    Shape:
        gate_up: [..., 2, F] -> [..., F].
    """
    gate, up = gate_up.unbind(-2)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return activate(gate, kind) * (up + up_offset if up_offset else up)


def gated(
    gate_up: Tensor,
    kind: str,
    *,
    clamp: float | None = None,
    up_offset: float = 0.0,
    kernel: str = AUTO,
) -> Tensor:
    """`gated_reference`; SwiGLU and GeGLU in eager mode have a backward that fills one buffer.

    Shape:
        gate_up: [..., 2, F] -> [..., F].

    Raises:
        ValueError: The named kernel, of `GATED_KERNELS`, does not serve; the message says why.
    """
    work = gate_up, kind, clamp, up_offset
    chosen = chosen_kernel("activation", GATED_KERNELS, kernel, *work)
    return chosen.run(gate_up, kind, clamp=clamp, up_offset=up_offset)


def silu_product(gate: Tensor, x: Tensor, *, kernel: str = AUTO) -> Tensor:
    """`silu(gate) * x`, which in eager mode keeps no product of its backward.

    Shape:
        gate, x: the same, which is returned.
    """
    return chosen_kernel("activation", SILU_PRODUCT_KERNELS, kernel, gate, x).run(gate, x)


def activation_choice(kernel: str, kind: str, like: Tensor, *terms: float | None) -> KernelChoice:
    """Say what `gated` takes, given its clamp and offset, or else `activate` for `relu2`."""
    x = like.new_empty(0, 2, 1)
    if not terms:
        return choice_of("activation", SQUARED_RELU_KERNELS, kernel, x)
    return choice_of("activation", GATED_KERNELS, kernel, x, kind, *terms)


_BY_TORCH = ("silu", "gelu", "gelu_tanh", "gelu_quick")  # whose derivative torch has
_GATES = {
    "silu": ("swiglu", {}),
    "gelu": ("geglu", {}),
    "gelu_tanh": ("geglu", {"approximate": "tanh"}),
    "gelu_quick": ("quick_geglu", {}),
}


def _fused_obstacle(
    gate_up: Tensor, kind: str, clamp: float | None, up_offset: float
) -> str | None:
    del clamp, up_offset
    if kind not in _GATES:
        return f"activation {kind} with a gate: it is for {', '.join(_GATES)}"
    return fused_obstacle(_GATES[kind][0], gate_up)


def _fused(gate_up: Tensor, kind: str, *, clamp: float | None, up_offset: float) -> Tensor:
    name, form = _GATES[kind]
    how = {"clamp": clamp, "up_offset": up_offset, "kernel": mt_fusions.fused_kernel(gate_up)}
    return getattr(mt_fusions, name)(*gate_up.unbind(-2), **form, **how)


def _fused_product(gate: Tensor, x: Tensor) -> Tensor:
    return mt_fusions.swiglu(gate, x, kernel=mt_fusions.fused_kernel(gate))


def _fused_square(x: Tensor) -> Tensor:
    return mt_fusions.squared_relu(x, kernel=mt_fusions.fused_kernel(x))


def _obstacle_of(operation: str) -> Callable[..., str | None]:
    return lambda x, *_: fused_obstacle(operation, x)


def _torch_obstacle(
    gate_up: Tensor, kind: str, clamp: float | None, up_offset: float
) -> str | None:
    if kind not in _BY_TORCH or clamp is not None or up_offset:
        return (
            f"activation {kind}, clamp {clamp}, offset {up_offset}: it is for "
            f"{', '.join(_BY_TORCH)} without either"
        )
    return eager_obstacle(gate_up)


def _torch_gated(gate_up: Tensor, kind: str, *, clamp: float | None, up_offset: float) -> Tensor:
    del clamp, up_offset
    return _Gated.apply(gate_up, kind)  # pyright: ignore[reportReturnType]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, kind: str) -> Tensor:
        gate, up = gate_up.unbind(-2)
        activated = activate(gate, kind)
        # The CPU keeps the activation: there it costs more to compute than to read back.
        ctx.save_for_backward(gate_up, activated if gate_up.device.type == "cpu" else None)
        ctx.kind = kind
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.unbind(-2)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.unbind(-2)
        activated = activate(gate, ctx.kind) if activated is None else activated
        torch.mul(grads[0], activated, out=grad_up)
        _activation_backward(grads[0] * up, gate, ctx.kind, out=grad_gate)
        return out, None


def _activation_backward(grad: Tensor, x: Tensor, kind: str, *, out: Tensor) -> None:
    """Write `grad` times the derivative of the activation at `x` into `out`."""
    if kind in ("silu", "gelu_quick"):  # x sigmoid(a x) has the slope of silu at a x
        x = x if kind == "silu" else _QUICK * x
        torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=out)
    else:
        form = "tanh" if kind == "gelu_tanh" else "none"
        torch.ops.aten.gelu_backward.grad_input(grad, x, approximate=form, grad_input=out)


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor) -> Tensor:
        activated = F.silu(gate)
        ctx.save_for_backward(gate, x, activated)
        return activated * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, x, activated = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0] * x, gate), grads[0] * activated


def _silu_product(gate: Tensor, x: Tensor) -> Tensor:
    return _SiluProduct.apply(gate, x)  # pyright: ignore[reportReturnType]


GATED_KERNELS: tuple[Kernel[Tensor], ...] = (
    Kernel("fused", _fused, _fused_obstacle, fused_drawback),
    Kernel("torch", _torch_gated, _torch_obstacle),
    Kernel("reference", gated_reference, serves),
)
SILU_PRODUCT_KERNELS: tuple[Kernel[Tensor], ...] = (
    Kernel("fused", _fused_product, _obstacle_of("swiglu"), fused_drawback),
    Kernel("torch", _silu_product, eager_obstacle),
    Kernel("reference", lambda gate, x: F.silu(gate) * x, serves),
)
SQUARED_RELU_KERNELS: tuple[Kernel[Tensor], ...] = (
    Kernel("fused", _fused_square, _obstacle_of("squared_relu"), fused_drawback),
    Kernel("torch", lambda x: F.relu(x).square(), serves),
    Kernel("reference", lambda x: F.relu(x).square(), serves),
)
