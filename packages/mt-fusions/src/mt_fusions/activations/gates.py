"""Candidates for gated activations and squared ReLU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from mt_kernels import Candidate, Registry, eager_obstacle
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_fusions.activations.activation import activate, activation_backward
from mt_fusions.activations.gated import GATED_KERNELS, geglu, quick_geglu, squared_relu, swiglu
from mt_fusions.activations.invariant import invariant_activation, invariant_gated
from mt_fusions.kernels import fused

_GATES: dict[str, Callable[..., Tensor]] = {
    "silu": swiglu,
    "gelu": geglu,
    "gelu_tanh": partial(geglu, approximate="tanh"),
    "gelu_quick": quick_geglu,
}


def _reference(
    gate_up: Tensor, kind: str, *, clamp: float | None = None, up_offset: float = 0.0
) -> Tensor:
    gate, up = gate_up.unbind(-2)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return activate(gate, kind) * (up + up_offset if up_offset else up)


def _fused(gate_up: Tensor, kind: str, *, kernel: str, **terms: float | None) -> Tensor:
    return _GATES[kind](*gate_up.unbind(-2), **terms, kernel=kernel)


_FUSED = fused(_fused, GATED_KERNELS)


def _fused_obstacle(gate_up: Tensor, kind: str, *_: Any) -> str | None:
    if kind not in _GATES:
        return f"activation {kind} with a gate: it is for {', '.join(_GATES)}"
    return _FUSED.obstacle(gate_up)


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
        activation_backward(grads[0] * up, gate, ctx.kind, out=grad_gate)
        return out, None


def _one_buffer(gate_up: Tensor, kind: str, **_: float | None) -> Tensor:
    if not torch.is_grad_enabled():
        gate, up = gate_up.unbind(-2)
        return activate(gate, kind) * up
    return _Gated.apply(gate_up, kind)  # pyright: ignore[reportReturnType]


def _one_buffer_obstacle(
    gate_up: Tensor, kind: str, clamp: float | None, up_offset: float
) -> str | None:
    if kind not in _GATES or clamp is not None or up_offset:
        return (
            f"activation {kind}, clamp {clamp}, offset {up_offset}: it is for "
            f"{', '.join(_GATES)} without either"
        )
    return eager_obstacle(gate_up)


def _invariant(gate_up: Tensor, kind: str, **terms: Any) -> Tensor:
    gate, up = gate_up.unbind(-2)
    return invariant_gated(gate, up, kind, **terms)


GATED: Registry[Callable[..., Tensor]] = Registry(
    "gated",
    (
        Candidate("fused", _FUSED.function, _fused_obstacle, _FUSED.drawback),
        Candidate("torch", _one_buffer, _one_buffer_obstacle),
        Candidate("reference", _reference),
        Candidate("invariant", _invariant),
    ),
)
"""`activate(gate, kind) * (up + up_offset)` of `(gate_up, kind, *, clamp, up_offset)`.

`gate_up` is [..., 2, F] and the result [..., F]. With a clamp the gate is cut to at most `clamp`
and `up` to between `-clamp` and `clamp` before. Obstacles get the four arguments in order.
"""


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


def _silu_product_reference(gate: Tensor, x: Tensor) -> Tensor:
    return F.silu(gate) * x


def _silu_product_invariant(gate: Tensor, x: Tensor) -> Tensor:
    return invariant_activation(gate, "silu") * x


SILU_PRODUCT: Registry[Callable[..., Tensor]] = Registry(
    "silu_product",
    (
        fused(swiglu, GATED_KERNELS),
        Candidate("torch", _silu_product, eager_obstacle),
        Candidate("reference", _silu_product_reference),
        Candidate("invariant", _silu_product_invariant),
    ),
)
"""`silu(gate) * x` of two tensors, which obstacles get too."""


def _squared_relu(x: Tensor) -> Tensor:
    return activate(x, "relu2")


SQUARED_RELU: Registry[Callable[..., Tensor]] = Registry(
    "squared_relu",
    (
        fused(squared_relu, GATED_KERNELS),
        Candidate("torch", _squared_relu),
        Candidate("reference", _squared_relu),
        Candidate("invariant", _squared_relu),
    ),
)
"""`max(x, 0)^2` of a tensor, which obstacles get too."""
