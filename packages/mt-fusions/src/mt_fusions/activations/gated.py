"""Gated activations of the feed-forward: SwiGLU and its kin (Shazeer, 2020), and squared ReLU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from mt_files import check_type
from mt_kernels import AUTO
from torch import Tensor

from mt_fusions.activations.activation import (
    activate,
    activation_and_slope,
    activation_backward,
)
from mt_fusions.arguments import check_floating, check_same
from mt_fusions.blocks import as_rows, row_blocks, wide_dtype
from mt_fusions.kernels import Functions, implementations
from mt_fusions.operator import operator

How = tuple[str, float | None, float]  # kind, clamp, up_offset


def swiglu(
    gate: Tensor,
    up: Tensor,
    *,
    weight: Tensor | None = None,
    clamp: float | None = None,
    up_offset: float = 0.0,
    kernel: str = AUTO,
) -> Tensor:
    """`gate * sigmoid(gate) * (up + up_offset)`, computed in fp32 (fp64 for fp64).

    Backward keeps the arguments, and computes the activation again; a CPU keeps that too where
    there are no weight, clamp and offset, and computes by torch's kernels in the dtype of `gate`.

    Args:
        gate: Any strides, such as one half of a wider tensor; the result is contiguous.
        up: Likewise.
        weight: Multiplies each row of the result, such as an expert's share of a token.
        clamp: Before, `gate` is cut to at most this, and `up` to between it and its negative.
        up_offset: Added to `up` after the cut.
        kernel: "auto", or one of "cpu", "triton" and "reference" by name.

    Shape:
        gate, up: [..., n]; weight: [...]. Returns the shape of gate.

    Raises:
        TypeError: Something is no floating tensor, or gate and up differ in dtype.
        ValueError: Shapes or devices do not fit, or the kernel does not serve.
    """
    return _gated("silu", gate, up, weight, clamp, up_offset, kernel)


def geglu(
    gate: Tensor,
    up: Tensor,
    *,
    approximate: Literal["none", "tanh"] = "none",
    weight: Tensor | None = None,
    clamp: float | None = None,
    up_offset: float = 0.0,
    kernel: str = AUTO,
) -> Tensor:
    """`gelu(gate) * (up + up_offset)`: `swiglu` with GELU, exact (erf) or by tanh, as torch's."""
    kinds = {"none": "gelu", "tanh": "gelu_tanh"}
    if approximate not in kinds:
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    return _gated(kinds[approximate], gate, up, weight, clamp, up_offset, kernel)


def quick_geglu(
    gate: Tensor,
    up: Tensor,
    *,
    weight: Tensor | None = None,
    clamp: float | None = None,
    up_offset: float = 0.0,
    kernel: str = AUTO,
) -> Tensor:
    """`gate * sigmoid(1.702 gate) * (up + up_offset)`: GPT-OSS has a clamp of 7 and an offset of 1.

    See `swiglu` for the arguments.
    """
    return _gated("gelu_quick", gate, up, weight, clamp, up_offset, kernel)


def squared_relu(x: Tensor, *, weight: Tensor | None = None, kernel: str = AUTO) -> Tensor:
    """`max(x, 0)^2` (So et al., 2021), with the weight and kernels of `swiglu`."""
    return _gated("relu2", x, None, weight, None, 0.0, kernel)


def _gated(
    kind: str,
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor | None,
    clamp: float | None,
    up_offset: float,
    kernel: str,
) -> Tensor:
    check_floating("gate", gate)
    check_type("up_offset", up_offset, float, int)
    if not gate.dim():
        raise ValueError("gate and up must have at least one dim, got a tensor of none")
    if up is not None:
        check_floating("up", up)
        check_same("up", up, "gate", gate)
    if weight is not None:
        check_floating("weight", weight)
        if weight.shape != gate.shape[:-1] or weight.device != gate.device:
            raise ValueError(
                f"weight {tuple(weight.shape)} on {weight.device} must have one number for each "
                f"row of {tuple(gate.shape)} on {gate.device}"
            )
    if clamp is not None:
        check_type("clamp", clamp, float, int)
        if not clamp > 0:
            raise ValueError(f"clamp must be above 0, or None for none, got {clamp}")
    trains = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (gate, up, weight)
    )
    return _forward(gate, up, weight, kind, clamp, up_offset, kernel, trains)[0]


def _cut(x: Tensor, clamp: float | None, *, below: bool) -> Tensor:
    if clamp is None:
        return x
    return x.clamp(-clamp if below else None, clamp)


def _reference(gate: Tensor, up: Tensor | None, weight: Tensor | None, how: How) -> Tensor:
    kind, clamp, offset = how
    wide = wide_dtype(gate.dtype)
    out, _ = activation_and_slope(_cut(gate.to(wide), clamp, below=False), kind)
    if up is not None:
        out = out * (_cut(up.to(wide), clamp, below=True) + offset)
    if weight is not None:
        out = out * weight.to(wide).unsqueeze(-1)
    return out.to(gate.dtype).contiguous()


def _reference_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor | None,
    how: How,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    kind, clamp, offset = how
    wide = wide_dtype(gate.dtype)
    g, x = grad.to(wide), gate.to(wide)
    activated, slope = activation_and_slope(_cut(x, clamp, below=False), kind)
    if clamp is not None:
        slope = slope.masked_fill(x > clamp, 0)
    grad_up = grad_weight = None
    if weight is not None:
        factor = activated if up is None else activated * _shifted(up.to(wide), clamp, offset)
        grad_weight = (g * factor).sum(-1)
        g = g * weight.to(wide).unsqueeze(-1)
    if up is not None:
        u = up.to(wide)
        grad_up = g * activated
        if clamp is not None:
            grad_up = grad_up.masked_fill(u.abs() > clamp, 0)
        grad_up = grad_up.to(up.dtype).contiguous()
        g = g * _shifted(u, clamp, offset)
    return (g * slope).to(gate.dtype).contiguous(), grad_up, grad_weight


def _shifted(up: Tensor, clamp: float | None, offset: float) -> Tensor:
    cut = _cut(up, clamp, below=True)
    return cut + offset if offset else cut


def _is_plain(up: Tensor | None, weight: Tensor | None, how: How) -> bool:
    return up is not None and weight is None and how[1:] == (None, 0.0)


def _cpu_forward(gate: Tensor, up: Tensor | None, weight: Tensor | None, how: How) -> Tensor:
    """Compute the reference in blocks."""
    out = gate.new_empty(gate.shape)
    for y, *block in _blocks(out, gate, up, weight):
        y.copy_(_reference(*_named(block, up, weight), how))
    return out


def _cpu_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor | None, how: How
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    grads = (
        gate.new_empty(gate.shape),
        None if up is None else up.new_empty(up.shape),
        None if weight is None else gate.new_empty(gate.shape[:-1], dtype=wide_dtype(gate.dtype)),
    )
    count = sum(x is not None for x in grads)
    for blocks in _blocks(*grads, grad, gate, up, weight):
        into, (g, *block) = blocks[:count], blocks[count:]
        found = _reference_backward(g, *_named(block, up, weight), how)
        for target, value in zip(into, (x for x in found if x is not None), strict=True):
            target.copy_(value)
    return grads


def _blocks(*tensors: Tensor | None) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of rows of the given tensors; a tensor with one number per row stays 1-D."""
    dims = max(x.dim() for x in tensors if x is not None)
    return row_blocks(
        *(as_rows(x) if x.dim() == dims else x.reshape(-1) for x in tensors if x is not None)
    )


def _named(
    block: list[Tensor], up: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    gate, *rest = block
    return gate, None if up is None else rest[0], None if weight is None else rest[-1]


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
    gate, up, weight = tensors
    if gate is None or not trains or kernel not in (AUTO, "cpu") or gate.device.type != "cpu":
        return False
    return _is_plain(up, weight, tuple(terms))


def _run(
    gate: Tensor, up: Tensor | None, weight: Tensor | None, *how: Any
) -> tuple[Tensor, Tensor]:
    *terms, name, _ = how
    kernel = GATED_KERNELS.find(name, gate)
    if up is None or kernel.name != "cpu" or not _is_plain(up, weight, tuple(terms)):
        return kernel.function.forward(gate, up, weight, tuple(terms)), gate.new_empty(0)
    kept = activate(gate, terms[0]).contiguous()
    if _keeps((gate, up, weight), how):
        return torch.mul(kept, up), kept
    return kept.mul_(up), gate.new_empty(0)


def _fake(
    gate: Tensor, up: Tensor | None, weight: Tensor | None, *how: Any
) -> tuple[Tensor, Tensor]:
    kept = gate.shape if _keeps((gate, up, weight), how) else 0
    return gate.new_empty(gate.shape), gate.new_empty(kept)


def _run_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor | None, kept: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *terms, name, _ = how
    if up is not None and _keeps((gate, up, weight), how):
        grad_up = torch.mul(kept, grad)
        grad_gate = torch.mul(grad, up, out=torch.empty_like(kept))
        activation_backward(grad_gate, gate, terms[0], out=grad_gate)
        return grad_gate, grad_up, gate.new_empty(0)
    kernel = GATED_KERNELS.find(name, gate).function
    grads = kernel.backward(grad, gate, up, weight, tuple(terms))
    grad_weight = gate.new_empty(0) if weight is None else grads[2].to(weight.dtype)
    return grads[0], gate.new_empty(0) if up is None else grads[1], grad_weight


def _fake_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        gate.new_empty(gate.shape),
        gate.new_empty(0 if up is None else up.shape),
        gate.new_empty(0) if weight is None else weight.new_empty(weight.shape),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    gate, up, weight, *ctx.how = inputs
    ctx.save_for_backward(gate, up, weight, output[1])


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    *tensors, kept = ctx.saved_tensors
    grads = _backward(grad, *tensors, kept, *ctx.how)
    pairs = zip(grads, tensors, strict=True)
    return (*(None if x is None else g for g, x in pairs), *(None for _ in ctx.how))


_HOW = "str kind, float? clamp, float up_offset, str kernel, bool trains"
_backward = operator(
    "gated_backward",
    f"(Tensor grad, Tensor gate, Tensor? up, Tensor? weight, Tensor kept, {_HOW}) "
    "-> (Tensor, Tensor, Tensor)",
    _run_backward,
    fake=_fake_backward,
)
_forward = operator(
    "gated",
    f"(Tensor gate, Tensor? up, Tensor? weight, {_HOW}) -> (Tensor, Tensor)",
    _run,
    fake=_fake,
    setup=_setup,
    gradient=_gradient,
)
