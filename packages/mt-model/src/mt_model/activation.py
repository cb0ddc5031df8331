"""Activations of the feed-forward, with SwiGLU as one function."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_model.kernels import Kernel, eager_obstacle, kernel_for, serves


def activate(x: Tensor, kind: str) -> Tensor:
    """`silu`, `gelu` (erf), `gelu_tanh` or `relu2` (So et al., 2021) of every element."""
    match kind:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu2":
            return F.relu(x).square()
    raise ValueError(f"activation {kind!r} is not one of silu, gelu, gelu_tanh, relu2")


def gated_reference(gate_up: Tensor, kind: str) -> Tensor:
    """`activate(gate) * up` (Shazeer, 2020). The plain form of `gated`.

    Shape:
        gate_up: [..., 2, F] -> [..., F].
    """
    gate, up = gate_up.unbind(-2)
    return activate(gate, kind) * up


def gated(gate_up: Tensor, kind: str) -> Tensor:
    """`gated_reference`; SwiGLU in eager mode has a backward that fills one buffer in place.

    Shape:
        gate_up: [..., 2, F] -> [..., F].
    """
    return kernel_for(GATED_KERNELS, gate_up, kind).run(gate_up, kind)


def _swiglu_obstacle(gate_up: Tensor, kind: str) -> str | None:
    return eager_obstacle(gate_up) or (None if kind == "silu" else f"activation {kind}")


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
    Kernel("swiglu", lambda gate_up, kind: _SwiGLU.apply(gate_up), _swiglu_obstacle),
    Kernel("reference", gated_reference, serves),
)
