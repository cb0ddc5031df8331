"""GELU of a sum with a bias (Hendrycks & Gimpel, 2016): what follows a projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mt_kernels import AUTO, Candidate, Registry
from torch import Tensor

from mt_fusions.activations.activation import activate, activation_and_slope
from mt_fusions.activations.invariant import invariant_activation
from mt_fusions.arguments import check_floating, check_of_columns
from mt_fusions.blocks import as_rows, row_blocks, wide_dtype
from mt_fusions.kernels import Functions, fused, implementations
from mt_fusions.operator import operator

Grads = tuple[Tensor, Tensor]  # of x and, in fp32 at least, of the bias


def bias_gelu(x: Tensor, bias: Tensor, *, kernel: str = AUTO) -> Tensor:
    """`gelu(x + bias)`, the exact one: `y (1 + erf(y / sqrt(2))) / 2`.

    Computed in fp32 (fp64 for fp64) and rounded once, also under autocast. Backward keeps `x` and
    the bias.

    Args:
        x: Any strides; the result is contiguous.
        bias: Any floating dtype.
        kernel: "auto", or one of "cpu", "triton" and "reference" by name.

    Shape:
        x: [..., n]; bias: [n]. Returns the shape of x.

    Raises:
        TypeError: Something is no floating tensor.
        ValueError: Shapes or devices do not fit, or the kernel does not serve.
    """
    return _bias_gelu(x, bias, "gelu", kernel)


def bias_gelu_tanh(x: Tensor, bias: Tensor, *, kernel: str = AUTO) -> Tensor:
    """`gelu(x + bias)` by tanh, as torch's `approximate="tanh"`: up to 5e-4 from `bias_gelu`.

    Megatron-LM's fused bias-GELU computes the same. See `bias_gelu` for arguments and errors.
    """
    return _bias_gelu(x, bias, "gelu_tanh", kernel)


def _bias_gelu(x: Tensor, bias: Tensor, kind: str, kernel: str) -> Tensor:
    check_floating("x", x)
    if not x.dim():
        raise ValueError("x must have at least one dim, got a tensor of none")
    check_of_columns("bias", bias, x)
    return _forward(x, bias, kind, kernel)


def _reference(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    wide = wide_dtype(x.dtype)
    return activation_and_slope(x.to(wide) + bias.to(wide), kind)[0].to(x.dtype).contiguous()


def _reference_backward(grad: Tensor, x: Tensor, bias: Tensor, kind: str) -> Grads:
    wide = wide_dtype(x.dtype)
    _, slope = activation_and_slope(x.to(wide) + bias.to(wide), kind)
    found = grad.to(wide) * slope
    total = found.sum(list(range(x.dim() - 1))) if x.dim() > 1 else found
    return found.to(x.dtype).contiguous(), total


def _cpu_forward(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """Compute with torch's kernels in blocks."""
    out, how = x.new_empty(x.shape), _approximate(kind)
    shift = bias.to(wide_dtype(x.dtype))
    for part, into in row_blocks(as_rows(x), as_rows(out)):
        total = part + shift
        if into.dtype == total.dtype:
            torch.ops.aten.gelu.out(total, approximate=how, out=into)
        else:
            into.copy_(torch.nn.functional.gelu(total, approximate=how))
    return out


def _cpu_backward(grad: Tensor, x: Tensor, bias: Tensor, kind: str) -> Grads:
    out, how = x.new_empty(x.shape), _approximate(kind)
    shift = bias.to(wide_dtype(x.dtype))
    grad_bias = torch.zeros_like(shift)
    for part, g, into in row_blocks(as_rows(x), as_rows(grad), as_rows(out)):
        total, wide = part + shift, g.to(shift.dtype)
        found = total if into.dtype != total.dtype else into
        torch.ops.aten.gelu_backward.grad_input(wide, total, approximate=how, grad_input=found)
        grad_bias += found.sum(0)
        if found is not into:
            into.copy_(found)
    return out, grad_bias


def _approximate(kind: str) -> str:
    return "tanh" if kind == "gelu_tanh" else "none"


def _triton() -> Functions:
    from mt_fusions.activations.triton_bias_gelu import backward, forward

    return Functions(forward, backward)


BIAS_GELU_KERNELS = implementations(
    "bias_gelu",
    cpu=Functions(_cpu_forward, _cpu_backward),
    triton=_triton,
    reference=Functions(_reference, _reference_backward),
)


def _run(x: Tensor, bias: Tensor, kind: str, kernel: str) -> Tensor:
    return BIAS_GELU_KERNELS.find(kernel, x).function.forward(x, bias, kind)


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _run_backward(grad: Tensor, x: Tensor, bias: Tensor, kind: str, kernel: str) -> Grads:
    found = BIAS_GELU_KERNELS.find(kernel, x).function.backward(grad, x, bias, kind)
    return found[0], found[1].to(bias.dtype)


def _fake_backward(grad: Tensor, x: Tensor, bias: Tensor, *_: Any) -> Grads:
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, *ctx.how = inputs
    ctx.save_for_backward(x, bias)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *_backward(grad, *ctx.saved_tensors, *ctx.how), None, None


_backward = operator(
    "bias_gelu_backward",
    "(Tensor grad, Tensor x, Tensor bias, str kind, str kernel) -> (Tensor, Tensor)",
    _run_backward,
    fake=_fake_backward,
)
_forward = operator(
    "bias_gelu",
    "(Tensor x, Tensor bias, str kind, str kernel) -> Tensor",
    _run,
    fake=_fake,
    setup=_setup,
    gradient=_gradient,
)


def _of_kind(x: Tensor, bias: Tensor, kind: str, *, kernel: str) -> Tensor:
    return (bias_gelu if kind == "gelu" else bias_gelu_tanh)(x, bias, kernel=kernel)


def _torch(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    return activate(x + bias, kind)


def _plain(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    wide = wide_dtype(x.dtype)
    return activate(x.to(wide) + bias.to(wide), kind).to(x.dtype)


def _invariant(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    wide = wide_dtype(x.dtype)
    return invariant_activation(x.to(wide) + bias.to(wide), kind).to(x.dtype)


BIAS_GELU: Registry[Callable[..., Tensor]] = Registry(
    "bias_gelu",
    (
        fused(_of_kind, BIAS_GELU_KERNELS),
        Candidate("torch", _torch),
        Candidate("reference", _plain),
        Candidate("invariant", _invariant),
    ),
)
"""GELU of a sum, of `(x, bias, kind)` with the kind `gelu` or `gelu_tanh`; obstacles get `x`.

Only `fused` is worth a bias of its own: else a projection adds it in the same pass.
"""
