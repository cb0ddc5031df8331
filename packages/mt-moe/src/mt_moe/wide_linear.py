"""A linear layer that multiplies in a wide dtype and keeps its operands as they are."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `x @ weight.T + bias` in a wide dtype; backward keeps `x` and `weight` unconverted.

    Shape:
        x: [..., H]; weight: [E, H]; bias: [E]. Returns [..., E].
    """
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), dtype)
    if x.dtype == weight.dtype == wide:
        with _no_autocast(x):
            return F.linear(x, weight, bias)
    logits = cast("Tensor", _WideLinear.apply(x, weight, wide))
    return logits if bias is None else logits + bias.to(wide)


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(x.device.type, enabled=False)


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        with _no_autocast(x):
            return F.linear(x.to(dtype), weight.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (x, weight) = grads, ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = grad.matmul(weight.to(grad.dtype)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            rows = x.flatten(0, -2).to(grad.dtype)
            grad_w = grad.flatten(0, -2).t().mm(rows).to(weight.dtype)
        return grad_x, grad_w, None
