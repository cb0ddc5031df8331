"""LayerNorm over the last dim (Ba et al., 2016)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from mt_kernels import AUTO, Candidate, Registry, eager_obstacle
from torch import Tensor

from mt_fusions.kernels import fused, fused_drawback
from mt_fusions.norms.form import Form
from mt_fusions.norms.norm import LAYER_NORM_KERNELS, norm, norm_reference


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    kernel: str = AUTO,
) -> Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dim.

    Computed in fp32 (fp64 for fp64) and rounded once, to the dtype of `x`, also under autocast. Per
    head where heads are a dim of `x`. Backward keeps `x`, the weight and two numbers per row.

    Args:
        x: Any strides; the result is contiguous.
        weight: Any floating dtype; None multiplies nothing.
        bias: Likewise; None adds nothing.
        eps: Added to the variance.
        zero_centered: The weight w stands for 1 + w (Megatron-LM's zero-centred gamma).
        kernel: "auto", or one of "cpu", "triton" and "reference" by name.

    Shape:
        x: [..., n]; weight, bias: [n]. Returns the shape of x.

    Raises:
        TypeError: Something is no floating tensor, or no number.
        ValueError: Shapes or devices do not fit, or the kernel does not serve.
    """
    form = Form(eps, centered=True, zero_centered=zero_centered, has_bias=bias is not None)
    return norm(x, None, weight, bias, form, kernel)[0]


def _reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
) -> Tensor:
    form = Form(eps, centered=True, zero_centered=zero_centered, has_bias=bias is not None)
    return norm_reference(x, None, weight, bias, form)[0]


def _torch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
) -> Tensor:
    factor = weight + 1 if zero_centered and weight is not None else weight
    return F.layer_norm(x, x.shape[-1:], factor, bias, eps)


def _drawback(x: Tensor, *_: Any) -> str | None:
    """Prefer torch's, but for 16 bits on a CPU: there it sums the weight's gradient in 16 bits."""
    if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        return eager_obstacle()
    return fused_drawback(x)


LAYER_NORM: Registry[Callable[..., Tensor]] = Registry(
    "layer_norm",
    (
        fused(layer_norm, LAYER_NORM_KERNELS, _drawback),
        Candidate("torch", _torch),
        Candidate("reference", _reference),
    ),
)
"""Functions of `layer_norm`'s arguments but the last; obstacles get `x`."""
