"""Attention as batched matrix products, with norms, rotation and packing in one function.

On a CPU torch's flash attention takes two to three times as long as plain products at training
lengths, nearly all of it in backward. This one keeps the probabilities (S x S per head, less those
that no query of a block sees), so it is for short sequences; `attention.py` decides.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_model.distance import add_in_order, spread_in_order
from mt_model.norm import rms_norm_reference
from mt_model.reference_attention import reference_attention
from mt_model.rotary import RotaryTable, rotate_reference, swap_pairs, turn
from mt_model.scores import Scores
from mt_model.seen import seen

BLOCK = 128  # queries that have the same keys


class Pairs(NamedTuple):
    """Which keys a query sees.

    Attributes:
        causal: Those up to its own place.
        window: Those less than so many places away; None for all.
        documents: Those of its document; None where all tokens are of one.

    Shape:
        documents: [B, S].
    """

    causal: bool = True
    window: int | None = None
    documents: Tensor | None = None

    def allowed(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """True where a query sees a key.

        Shape:
            Returns [queries, keys], or [B, queries, keys] with documents.
        """
        query, key = (torch.arange(own.start, own.stop, device=device) for own in (queries, keys))
        near = seen(query, key, self.window, causal=self.causal)
        if self.documents is None:
            return near
        query, key = (self.documents[:, own.start : own.stop] for own in (queries, keys))
        return near & (query[:, :, None] == key[:, None, :])

    def hide_(self, scores: Tensor, queries: range, keys: range) -> None:
        """Set the scores of pairs that do not count to minus infinity.

        Shape:
            scores: [B, heads, queries, keys].
        """
        is_plain = self.window is None and self.documents is None
        if is_plain and not self.causal:
            return
        if is_plain:  # all keys before the block count
            keys, scores = queries, scores[..., -len(queries) :]
        hidden = ~self.allowed(queries, keys, scores.device)
        scores.masked_fill_(hidden[:, None] if hidden.dim() == 3 else hidden, -torch.inf)

    def blocks(self, length: int) -> list[tuple[range, range]]:
        """Cut queries into blocks, each with the keys that any of it may see."""
        if not self.causal and self.window is None:
            return [(range(length), range(length))]
        far = length if self.window is None else self.window - 1
        found = []
        for start in range(0, length, BLOCK):
            stop = min(start + BLOCK, length)
            end = stop if self.causal else min(stop + far, length)
            found.append((range(start, stop), range(max(0, start - far), end)))
        return found


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
    pairs: Pairs | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Norm and rotate queries and keys, then softmax attention, in plain operations.

    Under a compiler queries are taken in blocks, with the keys that any of a block may see.

    Shape:
        As `matmul_attention`.
    """
    query, key, value = qkv.split((qkv.shape[3] - 2, 1, 1), dim=3)
    if norm is not None:
        query = rms_norm_reference(query, norm.query, norm.eps)
        key = rms_norm_reference(key, norm.key, norm.eps)
    if table is not None:
        query, key = rotate_reference(query, table), rotate_reference(key, table)
    query, key, value = (t.flatten(2, 3) for t in (query, key, value))
    pairs, length = pairs or Pairs(), qkv.shape[1]
    factor = qkv.shape[-1] ** -0.5 if scale is None else scale
    compiled, found = torch.compiler.is_compiling(), []
    for queries, keys in pairs.blocks(length) if compiled else [(range(length), range(length))]:
        allowed = pairs.allowed(queries, keys, qkv.device)
        allowed = allowed[:, None] if allowed.dim() == 3 else allowed
        added = None if bias is None else spread_in_order(bias.to(qkv.dtype), queries, keys)
        scores = Scores(scale=factor, allowed=allowed, bias=added)
        own = slice(keys.start, keys.stop)
        rows = query[:, queries.start : queries.stop], key[:, own], value[:, own]
        found.append(reference_attention(*rows, scores))
    return torch.cat(found, dim=1).flatten(2)


def matmul_attention(
    qkv: Tensor,
    table: RotaryTable | None,
    norm: HeadNorm | None,
    *,
    scale: float | None = None,
    pairs: Pairs | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`plain_matmul_attention` with a backward of its own; `torch.compile` takes the plain form.

    Scores are rounded to the dtype of `qkv`; norms and the softmax are taken in fp32 for bf16.

    Args:
        qkv: fused projections; in a group the queries come first, then key, then value.
        table: from `rotary_table` for these positions, or None.
        norm: of queries and keys, or None.
        scale: of the scores; 1 / sqrt(D) where None.
        pairs: which keys a query sees; those up to its own place where None.
        bias: added to the scores, by distance (`mt_model.distance.bias_by_distance`); or None.

    Shape:
        qkv: [B, S, G, Q + 2, D]; bias: [G * Q, 2 * S - 1]. Returns [B, S, G * Q * D].
    """
    if torch.compiler.is_compiling():
        return plain_matmul_attention(qkv, table, norm, scale=scale, pairs=pairs, bias=bias)
    query, key, eps = norm or (None, None, 0.0)
    # Under autocast tables and weights are wider than the projection.
    query, key, bias = (None if x is None else x.to(qkv.dtype) for x in (query, key, bias))
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    values, interleaved = (None, False) if table is None else table.to(qkv.dtype)
    if values is not None and values.dim() == 4:
        values = values[:, :, None, None]  # one for each row, over groups and parts
    options = eps, scale, interleaved, pairs or Pairs()
    with torch.autocast(qkv.device.type, enabled=False):
        return _MatmulAttention.apply(qkv, values, query, key, bias, options)  # pyright: ignore[reportReturnType]


class _MatmulAttention(torch.autograd.Function):
    # Inside, heads are laid out [B, G, part, S, D]: parts are the queries, the key and the value.

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        table: Tensor | None,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        bias: Tensor | None,
        options: tuple[float, float, bool, Pairs],
    ) -> Tensor:
        eps, scale, interleaved, pairs = options
        batch, length, groups, parts, width = qkv.shape
        # A copy also where the strides need none (one token): the norm below works in place.
        packed = qkv.permute(0, 2, 3, 1, 4).clone(memory_format=torch.contiguous_format)
        weight = rstd = None
        if query_weight is not None and key_weight is not None:
            rstd = _normalise_(packed[:, :, :-1], eps)
            weight = torch.cat((query_weight.expand(parts - 2, width), key_weight[None]))
        turned = _weigh_rotate(packed[:, :, :-1], weight, table, interleaved=interleaved)
        query, key, value = _heads(turned, packed)
        out = qkv.new_empty(batch, length, groups, parts - 2, width)
        kept = []
        for queries, keys in pairs.blocks(length):
            block = _rows(query, queries)
            product = key[:, keys.start : keys.stop].mT
            probs = torch.baddbmm(qkv.new_zeros(()), block, product, beta=0, alpha=scale)
            scores = probs.view(batch, -1, len(queries), len(keys))
            if bias is not None:
                scores += spread_in_order(bias, queries, keys)
            pairs.hide_(scores, queries, keys)
            torch.softmax(probs, dim=-1, out=probs)  # row by row, so it may be in place
            found = torch.bmm(probs, value[:, keys.start : keys.stop])
            found = found.view(batch, groups, parts - 2, len(queries), width)
            out[:, queries.start : queries.stop] = found.permute(0, 3, 1, 2, 4)
            kept.append(probs)
        ctx.save_for_backward(packed, turned, table, weight, rstd, *kept)
        ctx.scale, ctx.interleaved, ctx.pairs = scale, interleaved, pairs
        ctx.bias_dtype = bias.dtype if bias is not None and ctx.needs_input_grad[4] else None
        return out.view(batch, length, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        packed, turned, table, weight, rstd, *kept = ctx.saved_tensors
        batch, groups, parts, length, width = packed.shape
        query, key, value = _heads(turned, packed)
        grad = grads[0].view(batch, length, groups, parts - 2, width)
        grad_query = torch.empty_like(packed[:, :, :-2])
        wide = torch.promote_types(packed.dtype, torch.float32)  # for the sums over blocks
        grad_key, grad_value = (torch.zeros_like(key, dtype=wide) for _ in range(2))
        grad_bias = None
        if ctx.bias_dtype is not None:
            grad_bias = key.new_zeros(groups * (parts - 2), 2 * length - 1, dtype=wide)
        softmax_backward = torch.ops.aten._softmax_backward_data.out
        for (queries, keys), probs in zip(ctx.pairs.blocks(length), kept, strict=True):
            own = slice(keys.start, keys.stop)
            block = grad[:, queries.start : queries.stop].permute(0, 2, 3, 1, 4)
            block = block.reshape(batch * groups, -1, width)
            _add_product(grad_value[:, own], probs.mT, block)
            scores = torch.bmm(block, value[:, own].mT)
            softmax_backward(scores, probs, -1, probs.dtype, grad_input=scores)
            if grad_bias is not None:
                by_pair = scores.view(batch, -1, len(queries), len(keys))
                add_in_order(grad_bias, by_pair, queries, keys)
            found = torch.bmm(scores, key[:, own])
            grad_query[..., queries.start : queries.stop, :] = found.view(
                batch, groups, parts - 2, len(queries), width
            )
            _add_product(grad_key[:, own], scores.mT, _rows(query, queries))
        grad_packed = torch.empty_like(packed)
        grad_packed[:, :, -1] = grad_value.view(batch, groups, length, width)
        grad_key = grad_key.to(packed.dtype).view(batch, groups, 1, length, width)
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
            None if grad_bias is None else grad_bias.to(ctx.bias_dtype),
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


def _heads(turned: Tensor, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views for batched products: query [BG, Q, S, D], key and value [BG, S, D]."""
    heads, values = turned.flatten(0, 1), packed.flatten(0, 1)
    return heads[:, :-1], heads[:, -1], values[:, -1]


def _rows(heads: Tensor, places: range) -> Tensor:
    """Some tokens of all heads of a group, one below the other: [BG, Q, S, D] -> [BG, Q * s, D]."""
    return heads[:, :, places.start : places.stop].reshape(len(heads), -1, heads.shape[-1])


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a batched product to a sum, which may be wider."""
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    else:
        total += torch.bmm(a, b)
