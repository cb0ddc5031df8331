"""Rotary position embedding (Su et al., 2021), half-split: channel i turns with i + head_dim/2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotary_table(
    length: int,
    head_dim: int,
    theta: float,
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Tensor:
    """Cosine and sine of `position * theta^(-2i/head_dim)`, computed in fp64 and rounded once.

    Shape:
        Returns [2, length, head_dim / 2]: cosines, then sines.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    position = torch.arange(length, dtype=torch.float64, device=device)
    angle = torch.outer(position, theta**-exponent)
    return torch.stack((angle.cos(), angle.sin())).to(dtype)


def rotate_reference(x: Tensor, table: Tensor) -> Tensor:
    """`(a cos - b sin, b cos + a sin)` for the halves a, b of the last dim.

    Shape:
        x: [B, S, ..., D]; table: [2, S, D/2], or broadcastable after the middle dims are added.
    """
    cos, sin = _broadcast(table, x.dim())
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """`rotate_reference` with three passes and one buffer; backward turns the other way.

    Shape:
        x: [B, S, ..., D]; table: [2, S, D/2]. Returns a contiguous tensor like x.
    """
    if torch.compiler.is_compiling():
        return rotate_reference(x, table)
    return _Rotate.apply(x, table)  # pyright: ignore[reportReturnType]


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Write the turned `x` into `out`; neither may overlap the other.

    Shape:
        out, x: [..., D] of one shape and any strides; cos, sin: broadcastable to [..., D/2].
    """
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    torch.mul(a, cos, out=out[..., :half])
    torch.mul(b, cos, out=out[..., half:])
    out[..., :half].addcmul_(b, sin, value=-1)
    out[..., half:].addcmul_(a, sin)
    return out


def _broadcast(table: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    length, half = table.shape[-2:]
    cos, sin = table.view(2, length, *(1,) * (dims - 3), half).unbind(0)
    return cos, sin


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        cos, sin = _broadcast(table, x.dim())
        return rotate_into(x.new_empty(x.shape), x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (table,) = ctx.saved_tensors
        cos, sin = _broadcast(table, grads[0].dim())
        return rotate_into(grads[0].new_empty(grads[0].shape), grads[0], cos, -sin), None
