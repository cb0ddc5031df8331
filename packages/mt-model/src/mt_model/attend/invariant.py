"""Softmax attention whose bits for a query depend on nothing but the query and its keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_model.attend.scores import Scores
from mt_model.kernels.gemm import EVEN

KEYS = 32
"""Number of keys of a block; blocks begin at multiples of it in a text."""
ROWS = 8
"""Queries are padded to a multiple of this number, from which on products keep their bits."""
ROWS_AT_ONCE = 256
"""Number of queries, by head, whose products with all keys are made at a time."""


def invariant_attention(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Attend to blocks of keys of fixed size in fixed order, with sums in fp32 (fp64 for fp64).

    On a CPU a query has the same bits alone, in a chunk and in its whole sequence, whatever the
    other rows are, as long as the first key is at a multiple of `KEYS` in its text. Keys that a
    query does not see change nothing.

    Args:
        query: Queries, normed and rotated.
        key: Keys, likewise; each serves `N // G` consecutive query heads.
        value: Values of the keys.
        scores: Scale, mask, bias, cap and sinks; without dropout.

    Shape:
        query: [B, S, N, D]; key: [B, T, G, D]; value: [B, T, G, V]. Returns [B, S, N, V].
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    (rows, length, heads), groups = query.shape[:3], key.shape[2]
    shape = rows, groups, heads // groups * length
    q = _filled(query.transpose(1, 2).reshape(*shape, -1).to(wide), ROWS) * scores.scale
    k, v = (_by_head(x, KEYS, wide) for x in (key, value))
    hidden = _pairs(~_mask(scores, query, key), query, k, fill=True)
    bias = None if (pairs := scores.pairs()) is None else _pairs(pairs.to(wide), query, k, fill=0)
    sinks = None
    if scores.sinks is not None:
        sinks = scores.sinks.to(wide).view(1, groups, -1, 1).expand(rows, -1, -1, length)
        sinks = sinks.reshape(*shape, 1)[:, :, None]
    v = F.pad(v, (0, -v.shape[-1] % EVEN)) if v.shape[-1] % EVEN else v
    k, v = (x.unflatten(2, (-1, KEYS)) for x in (k, v))
    found = []
    for start in range(0, shape[2], ROWS_AT_ONCE):
        own = slice(start, min(start + ROWS_AT_ONCE, shape[2]))
        filled = slice(start, start + ROWS_AT_ONCE)
        made = q[:, :, None, filled] @ k.mT  # [B, G, blocks, rows, KEYS]
        made = made[:, :, :, : own.stop - start]  # what fills up serves the product alone
        if scores.softcap is not None:
            made = scores.softcap * torch.tanh(made / scores.softcap)
        if bias is not None:
            made = made + bias[:, :, :, own]
        found.append(_mixed(made.masked_fill(hidden[:, :, :, own], -torch.inf), v, sinks, own))
    out = torch.cat(found, 2)[..., : value.shape[-1]].to(query.dtype)
    return out.reshape(rows, heads, length, -1).transpose(1, 2)


def _mixed(scores: Tensor, v: Tensor, sinks: Tensor | None, own: slice) -> Tensor:
    """Mix values by the softmax of scores, in sums from block to block.

    Shape:
        scores: [B, G, blocks, rows, KEYS]; v: [B, G, blocks, KEYS, V]; sinks: [B, G, 1, all rows,
        1]. Returns [B, G, rows, V].
    """
    most = scores.detach().amax((2, 4), keepdim=True)  # a shift, whose gradient is none
    logits = None if sinks is None else sinks[:, :, :, own]
    if logits is not None:
        most = torch.maximum(most, logits.detach())
    weights = (scores - most).exp()
    # Blocks that a query does not see add zeros to the running sums of the blocks before.
    total = weights.sum(-1, keepdim=True).cumsum(2)[:, :, -1]
    if logits is not None:  # filled, as the bits of few exponentials depend on their number
        total = total + _filled(logits - most, ROWS).exp()[:, :, 0, : scores.shape[3]]
    mixed = (_filled(weights, ROWS) @ v)[:, :, :, : scores.shape[3]]
    return mixed.cumsum(2)[:, :, -1] / total


def invariant_obstacle(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> str | None:
    """Return why the attention can't be computed so; None if it can."""
    del query, key, value
    return "dropout" if scores.drops else None


def _mask(scores: Scores, query: Tensor, key: Tensor) -> Tensor:
    mask = scores.mask(query)
    return query.new_ones(1, key.shape[1], dtype=torch.bool) if mask is None else mask


def _by_head(x: Tensor, multiple: int, dtype: torch.dtype) -> Tensor:
    """Lay tokens out by head, filled with zeros up to a multiple, in one copy.

    Shape:
        x: [B, T, G, D]. Returns [B, G, T', D].
    """
    x = x.transpose(1, 2)
    rows, groups, length, width = x.shape
    if length % multiple == 0:
        return x.to(dtype, memory_format=torch.contiguous_format)
    filled = x.new_empty(rows, groups, length + -length % multiple, width, dtype=dtype)
    filled[:, :, :length] = x
    filled[:, :, length:] = 0
    return filled


def _filled(x: Tensor, multiple: int) -> Tensor:
    """Fill the dim before the last with zeros up to a multiple."""
    missing = -x.shape[-2] % multiple
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _pairs(x: Tensor, query: Tensor, k: Tensor, *, fill: float) -> Tensor:
    """Bring a mask or bias of pairs, which broadcasts to [B, N, S, T], to the rows of the product.

    Keys that fill up have the value of `fill`.

    Shape:
        query: [B, S, N, D]; k: [B, G, T', D]. Returns [B, G, blocks, rows, KEYS].
    """
    rows, length, heads = query.shape[:3]
    if missing := k.shape[2] - x.shape[-1]:
        x = F.pad(x, (0, missing), value=fill)
    x = x.expand(rows, heads, length, -1).reshape(rows, k.shape[1], -1, k.shape[2])
    return x.unflatten(3, (-1, KEYS)).transpose(2, 3)
