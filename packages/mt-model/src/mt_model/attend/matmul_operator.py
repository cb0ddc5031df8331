"""Attention as batched matrix products, forward and backward, as an operator of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from mt_fusions import operator, swap_pairs, turn
from torch import Tensor

from mt_model.attend.distance import add_in_order, spread_in_order
from mt_model.attend.pairs import Block, Pairs
from mt_model.kernels.onednn import onednn_products


class Form(NamedTuple):
    """The operator's arguments besides tensors; see `matmul_attention`."""

    eps: float
    scale: float
    interleaved: bool
    causal: bool
    window: int | None
    onednn: bool


# Inside, heads are laid out [B, G, part, S, D]: parts are the queries, the key and the value.


def _run(
    qkv: Tensor,
    table: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    bias: Tensor | None,
    documents: Tensor | None,
    *how: Any,
) -> tuple[Tensor, ...]:
    """Return the output, and for backward the heads, rotated heads, 1 / rms and weights."""
    form = Form(*how)
    batch, length, groups, parts, width = qkv.shape
    # A copy also where the strides need none (one token): the norm below works in place.
    packed = qkv.permute(0, 2, 3, 1, 4).clone(memory_format=torch.contiguous_format)
    rstd = qkv.new_empty(0)
    weight = _head_weights(query_weight, key_weight, parts)
    if weight is not None:
        rstd = _normalise_(packed[:, :, :-1], form.eps)
    turned = _weigh_rotate(packed[:, :, :-1], weight, table, interleaved=form.interleaved)
    query, key, value = _heads(turned, packed)
    out = qkv.new_empty(batch, length, groups, parts - 2, width)
    pairs, heads = Pairs(form.causal, form.window, documents), groups * (parts - 2)
    blocks = pairs.blocks(length)
    kept = qkv.new_empty(batch * heads * sum(block.size for block in blocks))
    for block, probs in _by_block(kept, blocks, batch * groups, parts - 2):
        rows, product = _rows(query, block.queries), block.of_keys(key).mT
        torch.baddbmm(qkv.new_zeros(()), rows, product, beta=0, alpha=form.scale, out=probs)
        scores = probs.view(batch, heads, len(block.queries), len(block.keys))
        if bias is not None:
            scores += spread_in_order(bias, *block)
        pairs.hide_(scores, *block)
        torch.softmax(probs, dim=-1, out=probs)  # row by row, so it may be in place
        found = torch.bmm(probs, block.of_keys(value))
        found = found.view(batch, groups, parts - 2, len(block.queries), width)
        out[:, block.queries.start : block.queries.stop] = found.permute(0, 3, 1, 2, 4)
    is_own = table is not None or weight is not None
    return (
        out.view(batch, length, -1),
        packed,
        turned if is_own else turned.new_empty(0),
        rstd,
        kept,
    )


def _fake(
    qkv: Tensor, table: Tensor | None, query_weight: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    form = Form(*rest[3:])
    batch, length, groups, parts, width = qkv.shape
    heads = batch * groups * (parts - 2)
    pairs = sum(block.size for block in Pairs(form.causal, form.window).blocks(length))
    has_turned = table is not None or query_weight is not None
    normed = (batch, groups, parts - 1, length)
    return (
        qkv.new_empty(batch, length, groups * (parts - 2) * width),
        qkv.new_empty(batch, groups, parts, length, width),
        qkv.new_empty((*normed, width) if has_turned else 0),
        qkv.new_empty((*normed, 1) if query_weight is not None else 0),
        qkv.new_empty(heads * pairs),
    )


def _run_backward(
    grad: Tensor,
    packed: Tensor,
    turned: Tensor,
    rstd: Tensor,
    kept: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    table, query_weight, key_weight, wants_bias = rest[:4]
    form = Form(*rest[4:])
    batch, groups, parts, length, width = packed.shape
    query, key, value = _heads(turned if len(turned) else packed[:, :, :-1], packed)
    grad = grad.view(batch, length, groups, parts - 2, width)
    grad_query = torch.empty_like(packed[:, :, :-2])
    wide = torch.promote_types(packed.dtype, torch.float32)  # for the sums over blocks
    grad_key, grad_value = (torch.zeros_like(key, dtype=wide) for _ in range(2))
    distances = 2 * length - 1 if wants_bias else 0
    grad_bias = key.new_zeros(groups * (parts - 2), distances, dtype=wide)
    softmax_backward = torch.ops.aten._softmax_backward_data.out
    blocks = Pairs(form.causal, form.window).blocks(length)
    for block, probs in _by_block(kept, blocks, batch * groups, parts - 2):
        rows = grad[:, block.queries.start : block.queries.stop].permute(0, 2, 3, 1, 4)
        rows = rows.reshape(batch * groups, -1, width)
        _add_product(block.of_keys(grad_value), probs.mT, rows)
        scores = torch.bmm(rows, block.of_keys(value).mT)
        softmax_backward(scores, probs, -1, probs.dtype, grad_input=scores)
        if wants_bias:
            by_pair = scores.view(batch, -1, len(block.queries), len(block.keys))
            add_in_order(grad_bias, by_pair, *block)
        found = torch.bmm(scores, block.of_keys(key))
        grad_query[..., block.queries.start : block.queries.stop, :] = found.view(
            batch, groups, parts - 2, len(block.queries), width
        )
        _add_product(block.of_keys(grad_key), scores.mT, _rows(query, block.queries))
    grad_packed = torch.empty_like(packed)
    grad_packed[:, :, -1] = grad_value.view(batch, groups, length, width)
    grad_key = grad_key.to(packed.dtype).view(batch, groups, 1, length, width)
    back = partial(_scale_rotate_back, table=table, scale=form.scale, interleaved=form.interleaved)
    back(grad_packed[:, :, :-2], grad_query)
    back(grad_packed[:, :, -2:-1], grad_key)
    of_weights = (packed.new_empty(0), packed.new_empty(0))
    weight = _head_weights(query_weight, key_weight, parts)
    if weight is not None:
        of_weights = _normalise_backward_(grad_packed[:, :, :-1], packed[:, :, :-1], weight, rstd)
    return grad_packed.permute(0, 3, 1, 2, 4).contiguous(), *of_weights, grad_bias


def _fake_backward(grad: Tensor, packed: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    del grad
    query_weight, wants_bias = rest[4], rest[6]
    batch, groups, parts, length, width = packed.shape
    wide = torch.promote_types(packed.dtype, torch.float32)
    distances = 2 * length - 1 if wants_bias else 0
    return (
        packed.new_empty(batch, length, groups, parts, width),
        *(packed.new_empty(0 if query_weight is None else width) for _ in range(2)),
        packed.new_empty(groups * (parts - 2), distances, dtype=wide),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *tensors, bias = inputs[:5]
    ctx.set_materialize_grads(False)
    ctx.form = inputs[6:]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(*output[1:], *tensors)


def _gradient(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad
    grad, of_query, of_key, of_bias = _backward(grads[0], *ctx.saved_tensors, needs[4], *ctx.form)
    return (
        grad,
        None,
        of_query if needs[2] else None,
        of_key if needs[3] else None,
        of_bias.to(ctx.bias_dtype) if needs[4] else None,
        *(None for _ in range(1 + len(ctx.form))),
    )


def _routed(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, whose last argument says whether its products go to oneDNN."""

    def routed(*args: Any) -> Any:
        with onednn_products(when=args[-1]):
            return run(*args)

    return routed


_FORM = "float eps, float scale, bool interleaved, bool causal, int? window, bool onednn"
_backward = operator(
    "matmul_attention_backward",
    "(Tensor grad, Tensor packed, Tensor turned, Tensor rstd, Tensor kept, Tensor? table, "
    f"Tensor? query_weight, Tensor? key_weight, bool wants_bias, {_FORM}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _routed(_run_backward),
    fake=_fake_backward,
    namespace="mt_model",
)
attend_by_products = operator(
    "matmul_attention",
    "(Tensor qkv, Tensor? table, Tensor? query_weight, Tensor? key_weight, Tensor? bias, "
    f"Tensor? documents, {_FORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _routed(_run),
    fake=_fake,
    setup=_setup,
    gradient=_gradient,
    namespace="mt_model",
)


def _by_block(
    kept: Tensor, blocks: Sequence[Block], groups: int, queries: int
) -> Iterator[tuple[Block, Tensor]]:
    """Yield each block with its weights, as a batch of matrices [groups, queries * s, keys]."""
    parts = kept.split([groups * queries * block.size for block in blocks])
    for block, part in zip(blocks, parts, strict=True):
        yield block, part.view(groups, queries * len(block.queries), len(block.keys))


def _head_weights(query: Tensor | None, key: Tensor | None, parts: int) -> Tensor | None:
    """Return the norm weights of a group's queries and key, [parts - 1, D]."""
    if query is None or key is None:
        return None
    return torch.cat((query.expand(parts - 2, len(query)), key[None]))


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
    """Turn the gradient of `normed * weight` into the input's, in place; return the weight's.

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
