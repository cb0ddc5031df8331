"""A linear layer that multiplies in a wide dtype and keeps its operands as they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def wide_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    then: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias` in a wide dtype; backward keeps `x` and `weight` unconverted.

    Rows are padded to a multiple of 32, and their width to one of 4: a CPU sums few rows, and rows
    that begin at odd places, in another order. The choice of a token's experts should not depend on
    the number of tokens. `then` is a function of single numbers to apply.

    Shape:
        x: [..., H]; weight: [E, H]; bias: [E]. Returns [..., E].
    """
    shape, rows = x.shape[:-1], x.flatten(0, -2)
    wider, more = -rows.shape[1] % 4, -rows.shape[0] % 32
    padded = F.pad(rows, (0, wider, 0, more)) if wider or more else rows
    y = _multiply(padded, F.pad(weight, (0, wider)) if wider else weight, bias, dtype)
    y = y if then is None else then(y)
    return y[: rows.shape[0]].unflatten(0, shape)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
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
