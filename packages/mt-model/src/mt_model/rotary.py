"""Rotary position embedding (Su et al., 2021), half-split: channel i turns with i + head_dim/2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_model.kernels import Kernel, eager_obstacle, kernel_for, serves


def rotary_table(positions: Tensor, head_dim: int, theta: float, *, dtype: torch.dtype) -> Tensor:
    """Cosine and sine of `position * theta^(-2i/head_dim)`, computed in fp64 and rounded once.

    Shape:
        positions: [S], or [B, S] where rows differ. Returns [2, S, head_dim] or [2, B, S,
        head_dim]: cosines for both halves, then sines, negated for the first half, so that
        `rotate` is `x * table[0] + swap_halves(x) * table[1]`.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angle = positions.double()[..., None] * theta**-exponent
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).to(dtype)


def swap_halves(x: Tensor) -> Tensor:
    """The two halves of the last dim, exchanged."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((b, a), dim=-1)


def rotate_reference(x: Tensor, table: Tensor) -> Tensor:
    """`(a cos - b sin, b cos + a sin)` for the halves a, b of the last dim.

    Shape:
        x: [B, S, ..., D]; table: [2, S, D] or [2, B, S, D]. Returns the shape of x.
    """
    cos, sin = _broadcast(table, x.dim())
    return x * cos + swap_halves(x) * sin


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """`rotate_reference` in eager mode with a backward that keeps no activation.

    Shape:
        x: [B, S, ..., D]; table: [2, S, D] or [2, B, S, D]. Returns the shape of x.
    """
    return kernel_for(ROTATE_KERNELS, x, table).run(x, table)


def _broadcast(table: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    between = (1,) * (dims - 3)
    cos, sin = table.view(*table.shape[:-1], *between, table.shape[-1]).unbind(0)
    return cos, sin


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        cos, sin = _broadcast(table, x.dim())
        return (x * cos).addcmul_(swap_halves(x), sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (table,) = ctx.saved_tensors
        cos, sin = _broadcast(table, grads[0].dim())
        return (grads[0] * cos).addcmul_(swap_halves(grads[0]), sin, value=-1), None


ROTATE_KERNELS: tuple[Kernel[Tensor], ...] = (
    Kernel("eager", _Rotate.apply, eager_obstacle),
    Kernel("reference", rotate_reference, serves),
)
