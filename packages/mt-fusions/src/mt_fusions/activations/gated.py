"""Gated activations of the feed-forward: SwiGLU and its kin (Shazeer, 2020), and squared ReLU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from mt_files import check_type
from mt_kernels import AUTO
from torch import Tensor

from mt_fusions.activations.activation import activate, activation_and_slope, activation_backward
from mt_fusions.arguments import check_floating, check_same
from mt_fusions.blocks import as_rows, row_blocks, wide_dtype
from mt_fusions.kernels import Functions, implementations
from mt_fusions.operator import operator

How = tuple[str, float | None, float]  # kind, clamp, up_offset


def swiglu(
    gate: Tensor,
    up: Tensor,
    *,
    clamp: float | None = None,
    up_offset: float = 0.0,
    kernel: str = AUTO,
) -> Tensor:
    """`gate * sigmoid(gate) * (up + up_offset)`, computed in fp32 (fp64 for fp64).

    Backward keeps the arguments, and computes the activation again; a CPU keeps that too where
    there are no clamp and offset, and computes by torch's kernels in the dtype of `gate`.

    Args:
        gate: Any strides, such as one half of a wider tensor; the result is contiguous.
        up: Likewise.
        clamp: Before, `gate` is cut to at most this, and `up` to between it and its negative.
        up_offset: Added to `up` after the cut.
        kernel: "auto", or one of "cpu", "triton" and "reference" by name.

    Shape:
        gate, up: [..., n]. Returns the shape of gate.

    Raises:
        TypeError: Something is no floating tensor, or gate and up differ in dtype.
        ValueError: Shapes or devices do not fit, or the kernel does not serve.
    """
    return _gated("silu", gate, up, clamp, up_offset, kernel)


def geglu(
    gate: Tensor,
    up: Tensor,
    *,
    approximate: Literal["none", "tanh"] = "none",
    clamp: float | None = None,
    up_offset: float = 0.0,
    kernel: str = AUTO,
) -> Tensor:
    """`gelu(gate) * (up + up_offset)`: `swiglu` with GELU, exact (erf) or by tanh, as torch's."""
    kinds = {"none": "gelu", "tanh": "gelu_tanh"}
    if approximate not in kinds:
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    return _gated(kinds[approximate], gate, up, clamp, up_offset, kernel)


def quick_geglu(
    gate: Tensor,
    up: Tensor,
    *,
    clamp: float | None = None,
    up_offset: float = 0.0,
    kernel: str = AUTO,
) -> Tensor:
    """`gate * sigmoid(1.702 gate) * (up + up_offset)`: GPT-OSS has a clamp of 7 and an offset of 1.

    See `swiglu` for the arguments.
    """
    return _gated("gelu_quick", gate, up, clamp, up_offset, kernel)


def squared_relu(x: Tensor, *, kernel: str = AUTO) -> Tensor:
    """`max(x, 0)^2` (So et al., 2021), with the kernels of `swiglu`."""
    return _gated("relu2", x, None, None, 0.0, kernel)


def _gated(
    kind: str, gate: Tensor, up: Tensor | None, clamp: float | None, up_offset: float, kernel: str
) -> Tensor:
    check_floating("gate", gate)
    check_type("up_offset", up_offset, float, int)
    if not gate.dim():
        raise ValueError("gate and up must have at least one dim, got a tensor of none")
    if up is not None:
        check_floating("up", up)
        check_same("up", up, "gate", gate)
    if clamp is not None:
        check_type("clamp", clamp, float, int)
        if not clamp > 0:
            raise ValueError(f"clamp must be above 0, or None for none, got {clamp}")
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (gate, up))
    return _forward(gate, up, kind, clamp, up_offset, kernel, trains)[0]


def _cut(x: Tensor, clamp: float | None, *, below: bool) -> Tensor:
    if clamp is None:
        return x
    return x.clamp(-clamp if below else None, clamp)


def _reference(gate: Tensor, up: Tensor | None, how: How) -> Tensor:
    kind, clamp, offset = how
    wide = wide_dtype(gate.dtype)
    out, _ = activation_and_slope(_cut(gate.to(wide), clamp, below=False), kind)
    if up is not None:
        out = out * (_cut(up.to(wide), clamp, below=True) + offset)
    return out.to(gate.dtype).contiguous()


def _reference_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, how: How
) -> tuple[Tensor, Tensor | None]:
    kind, clamp, offset = how
    wide = wide_dtype(gate.dtype)
    g, x = grad.to(wide), gate.to(wide)
    activated, slope = activation_and_slope(_cut(x, clamp, below=False), kind)
    if clamp is not None:
        slope = slope.masked_fill(x > clamp, 0)
    grad_up = None
    if up is not None:
        u = up.to(wide)
        grad_up = g * activated
        if clamp is not None:
            grad_up = grad_up.masked_fill(u.abs() > clamp, 0)
        grad_up = grad_up.to(up.dtype).contiguous()
        g = g * (_cut(u, clamp, below=True) + offset)
    return (g * slope).to(gate.dtype).contiguous(), grad_up


def _is_plain(up: Tensor | None, how: How) -> bool:
    return up is not None and how[1:] == (None, 0.0)


def _cpu_forward(gate: Tensor, up: Tensor | None, how: How) -> Tensor:
    """Compute the reference in blocks."""
    out = gate.new_empty(gate.shape)
    for y, x, *u in _blocks(out, gate, up):
        y.copy_(_reference(x, u[0] if u else None, how))
    return out


def _cpu_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, how: How
) -> tuple[Tensor, Tensor | None]:
    grad_gate = gate.new_empty(gate.shape)
    grad_up = None if up is None else up.new_empty(up.shape)
    for into, g, x, *more in _blocks(grad_gate, grad, gate, up, grad_up):
        u, into_up = more or (None, None)
        found, found_up = _reference_backward(g, x, u, how)
        into.copy_(found)
        if into_up is not None and found_up is not None:
            into_up.copy_(found_up)
    return grad_gate, grad_up


def _blocks(*tensors: Tensor | None) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of rows of the given tensors."""
    return row_blocks(*(as_rows(x) for x in tensors if x is not None))


def _triton() -> Functions:
    from mt_fusions.activations.triton_gated import backward, forward

    return Functions(forward, backward)


GATED_KERNELS = implementations(
    "gated",
    cpu=Functions(_cpu_forward, _cpu_backward),
    triton=_triton,
    reference=Functions(_reference, _reference_backward),
)


def _keeps(tensors: Sequence[Tensor | None], how: Sequence[Any]) -> bool:
    """Whether the activation is kept: on a CPU it costs more to compute than to read back."""
    *terms, kernel, trains = how
    gate, up = tensors
    if gate is None or not trains or kernel not in (AUTO, "cpu") or gate.device.type != "cpu":
        return False
    return _is_plain(up, tuple(terms))


def _run(gate: Tensor, up: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    *terms, name, _ = how
    kernel = GATED_KERNELS.find(name, gate)
    if up is None or kernel.name != "cpu" or not _is_plain(up, tuple(terms)):
        return kernel.function.forward(gate, up, tuple(terms)), gate.new_empty(0)
    kept = activate(gate, terms[0]).contiguous()
    if _keeps((gate, up), how):
        return torch.mul(kept, up), kept
    return kept.mul_(up), gate.new_empty(0)


def _fake(gate: Tensor, up: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    kept = gate.shape if _keeps((gate, up), how) else 0
    return gate.new_empty(gate.shape), gate.new_empty(kept)


def _run_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, kept: Tensor, *how: Any
) -> tuple[Tensor, Tensor]:
    *terms, name, _ = how
    if up is not None and _keeps((gate, up), how):
        grad_up = torch.mul(kept, grad)
        grad_gate = torch.mul(grad, up, out=torch.empty_like(kept))
        activation_backward(grad_gate, gate, terms[0], out=grad_gate)
        return grad_gate, grad_up
    kernel = GATED_KERNELS.find(name, gate).function
    grad_gate, grad_up = kernel.backward(grad, gate, up, tuple(terms))
    return grad_gate, gate.new_empty(0) if up is None else grad_up


def _fake_backward(grad: Tensor, gate: Tensor, up: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(0 if up is None else up.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    gate, up, *ctx.how = inputs
    ctx.save_for_backward(gate, up, output[1])


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    *tensors, kept = ctx.saved_tensors
    grads = _backward(grad, *tensors, kept, *ctx.how)
    pairs = zip(grads, tensors, strict=True)
    return (*(None if x is None else g for g, x in pairs), *(None for _ in ctx.how))


_HOW = "str kind, float? clamp, float up_offset, str kernel, bool trains"
_backward = operator(
    "gated_backward",
    f"(Tensor grad, Tensor gate, Tensor? up, Tensor kept, {_HOW}) -> (Tensor, Tensor)",
    _run_backward,
    fake=_fake_backward,
)
_forward = operator(
    "gated",
    f"(Tensor gate, Tensor? up, {_HOW}) -> (Tensor, Tensor)",
    _run,
    fake=_fake,
    setup=_setup,
    gradient=_gradient,
)
