"""Activations of the feed-forward, with SwiGLU as one function."""

from __future__ import annotations

from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_model.choice import Activation
from mt_model.kernels import Kernel, eager_obstacle, kernel_for, serves


def activate(x: Tensor, kind: str) -> Tensor:
    """The activation of every element, by its name.

    `silu`; `gelu` (exact, erf); `gelu_tanh`; `gelu_quick`, `x sigmoid(1.702 x)` (Hendrycks and
    Gimpel, 2016); `relu`; or `relu2`, its square (So et al., 2021).
    """
    match kind:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "gelu_quick":
            return x * torch.sigmoid(1.702 * x)
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
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
    gate_up: Tensor, kind: str, *, clamp: float | None = None, up_offset: float = 0.0
) -> Tensor:
    """`gated_reference`; SwiGLU in eager mode has a backward that fills one buffer in place.

    Shape:
        gate_up: [..., 2, F] -> [..., F].
    """
    kernel = kernel_for(GATED_KERNELS, gate_up, kind, clamp, up_offset)
    return kernel.run(gate_up, kind, clamp=clamp, up_offset=up_offset)


def _swiglu_obstacle(
    gate_up: Tensor, kind: str, clamp: float | None, up_offset: float
) -> str | None:
    if kind != "silu" or clamp is not None or up_offset:
        return f"activation {kind}, clamp {clamp}, offset {up_offset}: it is silu without either"
    return eager_obstacle(gate_up)


def _swiglu(gate_up: Tensor, kind: str, *, clamp: float | None, up_offset: float) -> Tensor:
    del kind, clamp, up_offset
    return _SwiGLU.apply(gate_up)  # pyright: ignore[reportReturnType]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.unbind(-2)
        activated = F.silu(gate)
        # The CPU keeps silu(gate): there it costs more to compute than to read back.
        ctx.save_for_backward(gate_up, activated if gate_up.device.type == "cpu" else None)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.unbind(-2)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.unbind(-2)
        torch.mul(grads[0], F.silu(gate) if activated is None else activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return out


GATED_KERNELS: tuple[Kernel[Tensor], ...] = (
    Kernel("swiglu", _swiglu, _swiglu_obstacle),
    Kernel("reference", gated_reference, serves),
)
