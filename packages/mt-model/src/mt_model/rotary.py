"""Rotary position embedding (Su et al., 2021), half-split: channel i turns with i + head_dim/2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mt_model.config import AttentionConfig


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
        Returns [2, length, head_dim]: cosines for both halves, then sines, negated for the first
        half, so that `rotate` is `x * table[0] + swap_halves(x) * table[1]`.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    position = torch.arange(length, dtype=torch.float64, device=device)
    angle = torch.outer(position, theta**-exponent)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1))).to(dtype)


class RotaryTables(nn.Module):
    """The tables of a stage's layers for every position, one per distinct (head_dim, theta).

    Args:
        mixers: of the layers; those without a theta don't rotate.
        length: positions.
        dtype: of the tables.
        device: of the tables.
    """

    def __init__(
        self,
        mixers: Iterable[AttentionConfig],
        *,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._names: dict[tuple[int, float], str] = {}
        for mixer in mixers:
            head_dim, theta = mixer.head_dim, mixer.rope_theta
            if theta is None or (head_dim, theta) in self._names:
                continue
            name = self._names[head_dim, theta] = f"table_{len(self._names)}"
            table = rotary_table(length, head_dim, theta, dtype=dtype, device=device)
            self.register_buffer(name, table, persistent=False)

    def at(self, start: int, length: int) -> dict[tuple[int, float], Tensor]:
        """Tables of positions `start` to `start + length` by (head_dim, theta), [2, length, D]."""
        return {
            key: self.get_buffer(name)[:, start : start + length]
            for key, name in self._names.items()
        }


def swap_halves(x: Tensor) -> Tensor:
    """The two halves of the last dim, exchanged."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((b, a), dim=-1)


def rotate_reference(x: Tensor, table: Tensor) -> Tensor:
    """`(a cos - b sin, b cos + a sin)` for the halves a, b of the last dim.

    Shape:
        x: [B, S, ..., D]; table: [2, S, D]. Returns the shape of x.
    """
    cos, sin = _broadcast(table, x.dim())
    return x * cos + swap_halves(x) * sin


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """`rotate_reference` in eager mode with a backward that keeps no activation.

    Shape:
        x: [B, S, ..., D]; table: [2, S, D]. Returns the shape of x.
    """
    if torch.compiler.is_compiling():
        return rotate_reference(x, table)
    return _Rotate.apply(x, table)  # pyright: ignore[reportReturnType]


def _broadcast(table: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    _, length, width = table.shape
    cos, sin = table.view(2, length, *(1,) * (dims - 3), width).unbind(0)
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
