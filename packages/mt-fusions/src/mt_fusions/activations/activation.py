"""Activations by name, and their derivatives."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_QUICK = 1.702
_TANH = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def activate(x: Tensor, kind: str) -> Tensor:
    """Return the activation of every element, by torch's kernels in the dtype of `x`.

    Args:
        x: The input.
        kind: `silu`; `gelu` (exact, erf); `gelu_tanh`; `gelu_quick`, `x sigmoid(1.702 x)`
            (Hendrycks and Gimpel, 2016); `relu`; or `relu2`, its square (So et al., 2021).
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
            return F.relu(x).square()
    kinds = "silu, gelu, gelu_tanh, gelu_quick, relu, relu2"
    raise ValueError(f"activation must be one of {kinds}, got {kind!r}")


def activation_backward(grad: Tensor, x: Tensor, kind: str, *, out: Tensor) -> None:
    """Write `grad` times the derivative of a smooth activation at `x` into `out`."""
    if kind in ("silu", "gelu_quick"):  # x sigmoid(a x) has the slope of silu at a x
        x = x if kind == "silu" else _QUICK * x
        torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=out)
    else:
        form = "tanh" if kind == "gelu_tanh" else "none"
        torch.ops.aten.gelu_backward.grad_input(grad, x, approximate=form, grad_input=out)


def activation_and_slope(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """An activation and its derivative, in plain torch.

    Shape:
        x: any. Returns the same twice.
    """
    match kind:
        case "silu" | "gelu_quick":
            scale = 1.0 if kind == "silu" else _QUICK
            share = torch.sigmoid(scale * x)
            return x * share, share + scale * x * share * (1 - share)
        case "gelu":
            share = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
            return x * share, share + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        case "gelu_tanh":
            turned = torch.tanh(_TANH * (x + _CUBIC * x**3))
            inner = _TANH * (1 + 3 * _CUBIC * x * x)
            half = 0.5 * (1 + turned)
            return x * half, half + 0.5 * x * (1 - turned * turned) * inner
        case _:
            positive = x.clamp(min=0)
            return positive * positive, 2 * positive
