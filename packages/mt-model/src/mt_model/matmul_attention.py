"""Causal attention as batched matrix products, with rotation and packing in the same function.

On a CPU torch's flash attention takes two to three times as long as plain products at training
lengths, nearly all of it in backward. This one keeps the probabilities (S x S per head), so it is
for short sequences; `attention.py` decides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_model.reference_attention import reference_attention
from mt_model.rotary import rotate_, rotate_reference, swap_halves


def plain_matmul_attention(qkv: Tensor, table: Tensor | None) -> Tensor:
    """Rotate queries and keys, then softmax attention over earlier positions, in plain operations.

    Shape:
        As `matmul_attention`.
    """
    query, key, value = qkv.split((qkv.shape[3] - 2, 1, 1), dim=3)
    if table is not None:
        query, key = rotate_reference(query, table), rotate_reference(key, table)
    query, key, value = (t.flatten(2, 3).transpose(1, 2) for t in (query, key, value))
    return reference_attention(query, key, value).transpose(1, 2).flatten(2)


def matmul_attention(qkv: Tensor, table: Tensor | None) -> Tensor:
    """`plain_matmul_attention` with a backward of its own; `torch.compile` takes the plain form.

    Scores are rounded to the dtype of `qkv`;
    the softmax is taken in fp32 for bf16.

    Args:
        qkv: fused projections; in a group the queries come first, then key, then value.
        table: from `rotary_table` for these positions, or None.

    Shape:
        qkv: [B, S, G, Q + 2, D]; table: [2, S, D]. Returns [B, S, G * Q * D].
    """
    if torch.compiler.is_compiling():
        return plain_matmul_attention(qkv, table)
    return _MatmulAttention.apply(qkv, table)  # pyright: ignore[reportReturnType]


class _MatmulAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, table: Tensor | None) -> Tensor:
        batch, length, groups, parts, width = qkv.shape
        packed = qkv.permute(0, 2, 3, 1, 4).contiguous()
        if table is not None:
            rotate_(packed[:, :, :-1], table[0], table[1])
        query, key, value = _split(packed)
        mask = _mask(length, qkv).repeat(parts - 2, 1)
        scores = torch.baddbmm(mask, query, key.transpose(1, 2), alpha=width**-0.5)
        probs = torch.softmax(scores, dim=-1, out=scores)  # row by row, so it may be in place
        ctx.save_for_backward(packed, probs, table)
        out = torch.bmm(probs, value).view(batch, groups, parts - 2, length, width)
        return out.permute(0, 3, 1, 2, 4).reshape(batch, length, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        packed, probs, table = ctx.saved_tensors
        batch, groups, parts, length, width = packed.shape
        query, key, value = _split(packed)
        grad = grads[0].view(batch, length, groups, parts - 2, width).permute(0, 2, 3, 1, 4)
        grad = grad.reshape(query.shape)
        grad_packed = torch.empty_like(packed)
        grad_packed[:, :, -1] = torch.bmm(probs.transpose(1, 2), grad).view_as(packed[:, :, -1])
        grad_scores = torch.bmm(grad, value.transpose(1, 2))
        softmax_backward = torch.ops.aten._softmax_backward_data.out
        softmax_backward(grad_scores, probs, -1, probs.dtype, grad_input=grad_scores)
        grad_query = torch.bmm(grad_scores, key).view_as(packed[:, :, :-2])
        grad_key = torch.bmm(grad_scores.transpose(1, 2), query).view_as(packed[:, :, -2:-1])
        _scale_rotate_back(grad_packed[:, :, :-2], grad_query, table, width**-0.5)
        _scale_rotate_back(grad_packed[:, :, -2:-1], grad_key, table, width**-0.5)
        return grad_packed.permute(0, 3, 1, 2, 4).contiguous(), None


def _split(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, G, Q + 2, S, D] -> query [BG, Q * S, D], key and value [BG, S, D], as views."""
    groups = packed.flatten(0, 1)
    return groups[:, :-2].flatten(1, 2), groups[:, -2], groups[:, -1]


def _scale_rotate_back(out: Tensor, grad: Tensor, table: Tensor | None, scale: float) -> None:
    """`out = scale * (grad * cos - swap_halves(grad) * sin)`, in two passes over `out`."""
    if table is None:
        torch.mul(grad, scale, out=out)
        return
    torch.mul(grad, table[0] * scale, out=out)
    out.addcmul_(swap_halves(grad), table[1], value=-scale)


def _mask(length: int, like: Tensor) -> Tensor:
    """Zero on and under the diagonal, minus infinity above."""
    return like.new_full((length, length), float("-inf")).triu_(1)
