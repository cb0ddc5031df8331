"""Candidates for the rotary embedding of queries and keys by a table with signs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mt_kernels import Candidate, Registry, eager_obstacle
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_fusions.attention.rope import ROPE_KERNELS, apply_rope
from mt_fusions.kernels import fused

Pair = tuple[Tensor, Tensor]


def swap_pairs(x: Tensor, *, interleaved: bool) -> Tensor:
    """Exchange the two channels of each pair of the last dim."""
    if interleaved:
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((b, a), dim=-1)


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, back: bool = False) -> Tensor:
    """Rotate the first channels of `x`, or the gradient `back`, in as few passes as may be.

    Shape:
        cos, sin: broadcast with x, but for the last dim, which may be narrower.
    """
    width = cos.shape[-1]
    turned = x if width == x.shape[-1] else x[..., :width]
    swapped = swap_pairs(turned, interleaved=interleaved)
    turned = (turned * cos).addcmul_(swapped, sin, value=-1 if back else 1)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def _rotated(x: Tensor, values: Tensor, *, interleaved: bool) -> Tensor:
    cos, sin = _broadcast(values, x.dim())
    turned, rest = x.tensor_split((cos.shape[-1],), dim=-1)
    turned = turned * cos + swap_pairs(turned, interleaved=interleaved) * sin
    return turned if not rest.shape[-1] else torch.cat((turned, rest), dim=-1)


def _broadcast(values: Tensor, dims: int) -> Pair:
    between = (1,) * (dims - 3)
    cos, sin = values.view(*values.shape[:-1], *between, values.shape[-1]).unbind(0)
    return cos, sin


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *table: Any) -> Tensor:
        values, interleaved = table
        ctx.save_for_backward(values)
        ctx.interleaved = interleaved
        return turn(x, *_broadcast(values, x.dim()), interleaved=interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos_sin = _broadcast(ctx.saved_tensors[0], grads[0].dim())
        return turn(grads[0], *cos_sin, interleaved=ctx.interleaved, back=True), None, None


def _torch(query: Tensor, key: Tensor, *table: Any) -> Pair:
    if not torch.is_grad_enabled():
        values, interleaved = table
        cos, sin = _broadcast(values, query.dim())
        return (
            turn(query, cos, sin, interleaved=interleaved),
            turn(key, cos, sin, interleaved=interleaved),
        )
    return _Rotate.apply(query, *table), _Rotate.apply(key, *table)  # pyright: ignore[reportReturnType]


def _reference(query: Tensor, key: Tensor, *table: Any) -> Pair:
    values, interleaved = table
    return tuple(_rotated(x, values, interleaved=interleaved) for x in (query, key))  # pyright: ignore[reportReturnType]


def _fused(query: Tensor, key: Tensor, *table: Any, kernel: str) -> Pair:
    values, interleaved = table
    tables = _without_signs(values, interleaved=interleaved)
    if query.dim() == 5:  # heads in groups, as in the projection: read there, a group for a token
        rows = [x.expand(*query.shape[:2], -1).flatten(0, 1).unsqueeze(1) for x in tables]
        tables = [x.expand(-1, query.shape[2], -1) for x in rows]
    own = [x.flatten(0, 1) if x.dim() == 5 else x for x in (query, key)]
    turned = apply_rope(*own, *tables, interleaved=interleaved, heads_dim=2, kernel=kernel)
    return turned[0].view(query.shape), turned[1].view(key.shape)


def _without_signs(values: Tensor, *, interleaved: bool) -> list[Tensor]:
    """Return cosines and sines for both channels of each pair, with no sign of their own."""
    cos, sin = values.unbind(0)
    if interleaved:
        return [cos, sin[..., 1::2].repeat_interleave(2, dim=-1)]
    return [cos, sin.chunk(2, dim=-1)[1].repeat(*(1,) * (sin.dim() - 1), 2)]


ROPE: Registry[Callable[..., Pair]] = Registry(
    "rope",
    (
        fused(_fused, ROPE_KERNELS),
        Candidate("torch", _torch, eager_obstacle),
        Candidate("reference", _reference),
    ),
)
"""`(a cos - b sin, b cos + a sin)` for pairs (a, b), of `(query, key, values, interleaved)`.

`values` [2, S, W] or [2, B, S, W] has cosines for both channels of each pair, then sines, negated
for the first. Queries and keys are [B, S, ..., D]; their channels from W on stay as they are.
Obstacles get the same arguments.
"""
