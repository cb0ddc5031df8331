"""Attention as batched matrix products, with norms, rotation and packing in one function.

On a CPU torch's flash attention takes two to three times as long as plain products at training
lengths, nearly all of it in backward. This one keeps the probabilities (S x S per head), so it is
for short sequences; `attention.py` decides.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_model.norm import rms_norm_reference
from mt_model.reference_attention import reference_attention
from mt_model.rotary import RotaryTable, rotate_reference, swap_pairs, turn


class HeadNorm(NamedTuple):
    """RMSNorm of queries and of keys, before the rotation.

    Shape:
        query, key: weights, [D].
    """

    query: Tensor
    key: Tensor
    eps: float


def plain_matmul_attention(
    qkv: Tensor,
    table: RotaryTable | None,
    norm: HeadNorm | None,
    *,
    scale: float | None = None,
    allowed: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Norm and rotate queries and keys, then softmax attention, in plain operations.

    Shape:
        As `matmul_attention`.
    """
    query, key, value = qkv.split((qkv.shape[3] - 2, 1, 1), dim=3)
    if norm is not None:
        query = rms_norm_reference(query, norm.query, norm.eps)
        key = rms_norm_reference(key, norm.key, norm.eps)
    if table is not None:
        query, key = rotate_reference(query, table), rotate_reference(key, table)
    query, key, value = (t.flatten(2, 3).transpose(1, 2) for t in (query, key, value))
    if allowed is None and not causal:
        allowed = torch.ones(qkv.shape[1], qkv.shape[1], dtype=torch.bool, device=qkv.device)
    seen = allowed[:, None] if allowed is not None and allowed.dim() == 3 else allowed
    out = reference_attention(query, key, value, allowed=seen, scale=scale)
    return out.transpose(1, 2).flatten(2)


def matmul_attention(
    qkv: Tensor,
    table: RotaryTable | None,
    norm: HeadNorm | None,
    *,
    scale: float | None = None,
    allowed: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """`plain_matmul_attention` with a backward of its own; `torch.compile` takes the plain form.

    Scores are rounded to the dtype of `qkv`; norms and the softmax are taken in fp32 for bf16.

    Args:
        qkv: fused projections; in a group the queries come first, then key, then value.
        table: from `rotary_table` for these positions, or None.
        norm: of queries and keys, or None.
        scale: of the scores; 1 / sqrt(D) where None.
        allowed: True where a query sees a key.
        causal: where `allowed` is None a query sees the tokens up to its own; False: all.

    Shape:
        qkv: [B, S, G, Q + 2, D]; allowed: [S, S] or [B, S, S]. Returns [B, S, G * Q * D].
    """
    if torch.compiler.is_compiling():
        options = {"scale": scale, "allowed": allowed, "causal": causal}
        return plain_matmul_attention(qkv, table, norm, **options)
    query, key, eps = norm or (None, None, 0.0)
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    values, interleaved = (None, False) if table is None else table
    if values is not None and values.dim() == 4:
        values = values[:, :, None, None]  # one for each row, over groups and parts
    if allowed is None and not causal:
        allowed = torch.ones(qkv.shape[1], qkv.shape[1], dtype=torch.bool, device=qkv.device)
    options = eps, scale, interleaved
    return _MatmulAttention.apply(qkv, values, query, key, options, allowed)  # pyright: ignore[reportReturnType]


class _MatmulAttention(torch.autograd.Function):
    # Inside, heads are laid out [B, G, part, S, D]: parts are the queries, the key and the value.

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        table: Tensor | None,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        options: tuple[float, float, bool],
        allowed: Tensor | None,
    ) -> Tensor:
        eps, scale, interleaved = options
        batch, length, groups, parts, width = qkv.shape
        # A copy also where the strides need none (one token): the norm below works in place.
        packed = qkv.permute(0, 2, 3, 1, 4).clone(memory_format=torch.contiguous_format)
        weight = rstd = None
        if query_weight is not None and key_weight is not None:
            rstd = _normalise_(packed[:, :, :-1], eps)
            weight = torch.cat((query_weight.expand(parts - 2, width), key_weight[None]))
        turned = _weigh_rotate(packed[:, :, :-1], weight, table, interleaved=interleaved)
        query, key, value = _flatten(turned, packed)
        mask = _mask(allowed, qkv)
        scores = torch.baddbmm(mask, query, key.transpose(1, 2), alpha=scale)
        probs = torch.softmax(scores, dim=-1, out=scores)  # row by row, so it may be in place
        ctx.save_for_backward(packed, turned, probs, table, weight, rstd)
        ctx.scale, ctx.interleaved = scale, interleaved
        out = torch.bmm(probs, value).view(batch, groups, parts - 2, length, width)
        return out.permute(0, 3, 1, 2, 4).reshape(batch, length, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        packed, turned, probs, table, weight, rstd = ctx.saved_tensors
        batch, groups, parts, length, width = packed.shape
        query, key, value = _flatten(turned, packed)
        grad = grads[0].view(batch, length, groups, parts - 2, width).permute(0, 2, 3, 1, 4)
        grad = grad.reshape(query.shape)
        grad_packed = torch.empty_like(packed)
        grad_packed[:, :, -1] = torch.bmm(probs.transpose(1, 2), grad).view_as(packed[:, :, -1])
        grad_scores = torch.bmm(grad, value.transpose(1, 2))
        softmax_backward = torch.ops.aten._softmax_backward_data.out
        softmax_backward(grad_scores, probs, -1, probs.dtype, grad_input=grad_scores)
        grad_query = torch.bmm(grad_scores, key).view_as(packed[:, :, :-2])
        grad_key = torch.bmm(grad_scores.transpose(1, 2), query).view_as(packed[:, :, -2:-1])
        back = partial(
            _scale_rotate_back, table=table, scale=ctx.scale, interleaved=ctx.interleaved
        )
        back(grad_packed[:, :, :-2], grad_query)
        back(grad_packed[:, :, -2:-1], grad_key)
        grad_weights = (None, None)
        if weight is not None and rstd is not None:
            normed = packed[:, :, :-1]
            grad_weights = _normalise_backward_(grad_packed[:, :, :-1], normed, weight, rstd)
        return (
            grad_packed.permute(0, 3, 1, 2, 4).contiguous(),
            None,
            *grad_weights,
            None,
            None,
            None,
        )


def _normalise_(x: Tensor, eps: float) -> Tensor:
    """Divide `x` by its root mean square over the last dim, in place; returns the factors."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    rstd = rstd.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    wide.mul_(rstd)
    if wide is not x:
        x.copy_(wide)
    return rstd.to(x.dtype)


def _normalise_backward_(
    grad: Tensor, normed: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """From the gradient of `normed * weight` to that of the input, in place; returns weights'.

    With n = normed and r = rstd: dx = r (g w - n mean(g w n)), and dw sums g n over the tokens.
    """
    width, weight_PD1 = normed.shape[-1], weight.unsqueeze(-1)
    product = grad * normed
    by_head = product.new_ones(1, product.shape[-2]).matmul(product).squeeze(-2)
    grad_weight = by_head.flatten(0, 1).sum(0)
    coefficient = product.matmul(weight_PD1).div_(-width)
    grad.mul_(weight.unsqueeze(1)).addcmul_(normed, coefficient).mul_(rstd)
    return grad_weight[:-1].sum(0), grad_weight[-1]


def _weigh_rotate(
    x: Tensor, weight: Tensor | None, table: Tensor | None, *, interleaved: bool
) -> Tensor:
    """`rotate(x * weight)` with the weight folded into the table: two passes and a swap."""
    if table is None:
        return x if weight is None else x * weight.unsqueeze(1)
    cos, sin = table.unbind(0)
    if weight is None:
        return turn(x, cos, sin, interleaved=interleaved)
    width = cos.shape[-1]
    first, rest = (w.unsqueeze(1) for w in weight.tensor_split((width,), dim=-1))
    cos, sin = cos * first, sin * swap_pairs(first, interleaved=interleaved)
    turned = turn(x[..., :width], cos, sin, interleaved=interleaved)
    return torch.cat((turned, x[..., width:] * rest), -1) if rest.shape[-1] else turned


def _scale_rotate_back(
    out: Tensor, grad: Tensor, *, table: Tensor | None, scale: float, interleaved: bool
) -> None:
    """`out = scale * (grad * cos - swap_pairs(grad) * sin)`, in two passes over `out`."""
    width = 0 if table is None else table.shape[-1]
    if width < out.shape[-1]:
        torch.mul(grad[..., width:], scale, out=out[..., width:])
    if table is None:
        return
    turned, into = grad[..., :width], out[..., :width]
    torch.mul(turned, table[0] * scale, out=into)
    into.addcmul_(swap_pairs(turned, interleaved=interleaved), table[1], value=-scale)


def _flatten(turned: Tensor, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views for batched products: query [BG, Q * S, D], key and value [BG, S, D]."""
    heads, values = turned.flatten(0, 1), packed.flatten(0, 1)
    return heads[:, :-1].flatten(1, 2), heads[:, -1], values[:, -1]


def _mask(allowed: Tensor | None, qkv: Tensor) -> Tensor:
    """Zero where a query sees a key and minus infinity elsewhere: [Q * S, S], or [BG, Q * S, S]."""
    batch, length, groups, parts, _ = qkv.shape
    if allowed is None:
        mask = qkv.new_full((length, length), float("-inf")).triu_(1)
    else:
        mask = qkv.new_zeros(allowed.shape).masked_fill_(~allowed, float("-inf"))
    if mask.dim() == 2:
        return mask.repeat(parts - 2, 1)
    return (
        mask[:, None, None]
        .expand(batch, groups, parts - 2, -1, -1)
        .reshape(batch * groups, -1, length)
    )
