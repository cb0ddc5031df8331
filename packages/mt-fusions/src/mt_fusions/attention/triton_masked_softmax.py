"""Softmax of attention scores in Triton: a row, or several short ones, in a program's registers."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_fusions.gpu.launch import row_tiles


@triton.jit
def _forward_kernel(
    X, MASK, SINKS, P, REST, rows, heads, queries, keys,
    mask_batch, mask_head, mask_query, mask_key, scale,
    HAS_MASK: tl.constexpr, HAS_SINKS: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    here = (row < rows)[:, None] & (column < keys)[None, :]
    query = row % queries
    head = (row // queries) % heads
    seen = here
    if CAUSAL:
        seen = seen & (column[None, :] <= (query + keys - queries)[:, None])
    if HAS_MASK:
        batch = row // (queries * heads)
        of_row = batch * mask_batch + head * mask_head + query * mask_query
        at = of_row[:, None] + column.to(tl.int64)[None, :] * mask_key
        seen = seen & (tl.load(MASK + at, mask=here, other=0) != 0)
    at = row[:, None] * keys + column[None, :]
    x = tl.load(X + at, mask=seen, other=0.0).to(tl.float32) * scale
    x = tl.where(seen, x, float("-inf"))
    high = tl.max(x, 1)
    if HAS_SINKS:
        sink = tl.load(SINKS + head, mask=row < rows, other=0.0).to(tl.float32)
        high = tl.maximum(high, sink)
    high = tl.where(high == float("-inf"), 0.0, high)  # of a row that sees nothing
    p = tl.exp(x - high[:, None])
    total = tl.sum(p, 1)
    if HAS_SINKS:
        rest = tl.exp(sink - high)
        total += rest
        tl.store(REST + row, rest / total, mask=row < rows)
    p = p / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(P + at, p.to(P.dtype.element_ty), mask=here)


@triton.jit
def _backward_kernel(
    G, P, REST, DX, DREST, rows, keys, scale,
    HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    here = (row < rows)[:, None] & (column < keys)[None, :]
    at = row[:, None] * keys + column[None, :]
    g = tl.load(G + at, mask=here, other=0.0).to(tl.float32)
    p = tl.load(P + at, mask=here, other=0.0).to(tl.float32)
    mean = tl.sum(g * p, 1)
    grad = p * (g - mean[:, None]) * scale
    tl.store(DX + at, grad.to(DX.dtype.element_ty), mask=here)
    if HAS_SINKS:
        rest = tl.load(REST + row, mask=row < rows, other=0.0)
        tl.store(DREST + row, -rest * mean, mask=row < rows)


def forward(
    scores: Tensor, mask: Tensor | None, sinks: Tensor | None, form: tuple[float, bool]
) -> tuple[Tensor, Tensor]:
    """Return the probabilities, and with sinks what these take of each row."""
    scale, causal = form
    x = scores.contiguous()
    _, heads, queries, keys = x.shape
    rows = x.numel() // keys
    probs = torch.empty_like(x)
    rest = x.new_empty(0 if sinks is None else x.shape[:-1], dtype=torch.float32)
    own = None if mask is None else mask.view(torch.uint8)
    tile = row_tiles(keys)
    _forward_kernel[(triton.cdiv(rows, tile.rows),)](
        x, own, None if sinks is None else sinks.contiguous(), probs, rest,
        rows, heads, queries, keys, *((0,) * 4 if own is None else own.stride()), scale,
        HAS_MASK=own is not None, HAS_SINKS=sinks is not None, CAUSAL=causal,
        ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
    )  # fmt: skip
    return probs, rest


def backward(grad: Tensor, probs: Tensor, rest: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of the scores and, for each row, of its sink."""
    grad, probs = grad.contiguous(), probs.contiguous()
    keys = grad.shape[-1]
    rows = grad.numel() // keys
    out, of_sinks, tile = torch.empty_like(grad), torch.empty_like(rest), row_tiles(keys)
    _backward_kernel[(triton.cdiv(rows, tile.rows),)](
        grad, probs, rest, out, of_sinks, rows, keys, scale,
        HAS_SINKS=rest.numel() > 0,
        ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
    )  # fmt: skip
    return out, of_sinks
