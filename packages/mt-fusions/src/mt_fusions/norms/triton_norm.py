"""RMSNorm and LayerNorm in Triton: a row, or several short ones, in one program's registers."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_fusions.gpu.launch import programs, row_tiles
from mt_fusions.norms.form import Form, Grads, Normed, Stats


@triton.jit
def _factor(W, column, size, ZERO_CENTERED: tl.constexpr):
    w = tl.load(W + column, mask=column < size, other=0.0).to(tl.float32)
    return w + 1 if ZERO_CENTERED else w


@triton.jit
def _forward_kernel(
    X, RESIDUAL, W, B, Y, TOTAL, M, R, rows, size, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    here = (row < rows)[:, None] & (column < size)[None, :]
    at = row[:, None] * size + column[None, :]
    x = tl.load(X + at, mask=here, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:  # the norm is that of the rounded sum
        x += tl.load(RESIDUAL + at, mask=here, other=0.0).to(tl.float32)
        rounded = x.to(TOTAL.dtype.element_ty)
        tl.store(TOTAL + at, rounded, mask=here)
        x = rounded.to(tl.float32)
    if CENTERED:
        mean = tl.sum(x, 1) / size
        tl.store(M + row, mean, mask=row < rows)
        x = tl.where(here, x - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(x * x, 1) / size + eps)
    tl.store(R + row, rstd, mask=row < rows)
    y = x * rstd[:, None]
    if ROUNDS_FIRST:
        y = y.to(Y.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        y *= _factor(W, column, size, ZERO_CENTERED)[None, :]
    if HAS_BIAS:
        y += tl.load(B + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=here)


@triton.jit
def _backward_kernel(
    G, G_TOTAL, X, W, M, R, DX, DW, DB, rows, size,
    HAS_TOTAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    SUMS_WEIGHT: tl.constexpr, SUMS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # A program goes over every n-th tile, and keeps its part of the gradients of weight and bias:
    # the sum over programs has a fixed order, so two runs give the same bits.
    column = tl.arange(0, COLUMNS)
    if SUMS_WEIGHT:
        of_weight = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if SUMS_BIAS:
        of_bias = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.arange(0, ROWS).to(tl.int64) + tile * ROWS
        here = (row < rows)[:, None] & (column < size)[None, :]
        at = row[:, None] * size + column[None, :]
        g = tl.load(G + at, mask=here, other=0.0).to(tl.float32)
        x = tl.load(X + at, mask=here, other=0.0).to(tl.float32)
        if CENTERED:
            x -= tl.load(M + row, mask=row < rows, other=0.0)[:, None]
        rstd = tl.load(R + row, mask=row < rows, other=0.0)
        normed = x * rstd[:, None]
        if SUMS_BIAS:
            of_bias += g
        if SUMS_WEIGHT:
            of_weight += g * normed
        if HAS_WEIGHT:  # w from the cache: its registers are worth more
            g *= _factor(W, column, size, ZERO_CENTERED)[None, :]
        share = tl.sum(g * normed, 1) / size
        grad = g - normed * share[:, None]
        if CENTERED:
            grad -= (tl.sum(g, 1) / size)[:, None]
        grad *= rstd[:, None]
        if HAS_TOTAL:
            grad += tl.load(G_TOTAL + at, mask=here, other=0.0).to(tl.float32)
        tl.store(DX + at, grad.to(DX.dtype.element_ty), mask=here)
    of_program = tl.program_id(0).to(tl.int64) * size + column
    if SUMS_WEIGHT:
        tl.store(DW + of_program, tl.sum(of_weight, 0), mask=column < size)
    if SUMS_BIAS:
        tl.store(DB + of_program, tl.sum(of_bias, 0), mask=column < size)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, form: Form
) -> Normed:
    """Return the norm, the sum with the residual, and mean and inverse root of each row."""
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    size = x.shape[-1]
    rows = x.numel() // size
    y, total = torch.empty_like(x), x.new_empty(0 if residual is None else x.shape)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    mean = torch.empty_like(rstd) if form.centered else rstd.new_empty(0)
    tile = row_tiles(size)
    if rows:
        _forward_kernel[(triton.cdiv(rows, tile.rows),)](
            x, residual, weight, bias, y, total, mean, rstd, rows, size, form.eps,
            HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None,
            HAS_BIAS=form.has_bias, CENTERED=form.centered, ZERO_CENTERED=form.zero_centered,
            ROUNDS_FIRST=form.rounds_first,
            ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    return y, total, mean, rstd


def backward(
    grad: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    stats: Stats,
    form: Form,
    *,
    sums: bool,
) -> Grads:
    """Return the gradients of the input and, with `sums`, in fp32, of weight and bias."""
    grad, x = grad.contiguous(), x.contiguous()
    grad_total = None if grad_total is None else grad_total.contiguous()
    size = x.shape[-1]
    rows = x.numel() // size
    grad_x, tile = torch.empty_like(x), row_tiles(size)
    count = programs(triton.cdiv(rows, tile.rows), x.device)
    has = sums and weight is not None, sums and form.has_bias
    parts = [x.new_empty(count, size if there else 0, dtype=torch.float32) for there in has]
    if count:  # LayerNorm sums two gradients in registers, and takes twice the threads
        _backward_kernel[(count,)](
            grad, grad_total, x, weight, *stats, grad_x, *parts, rows, size,
            HAS_TOTAL=grad_total is not None, HAS_WEIGHT=weight is not None,
            CENTERED=form.centered, ZERO_CENTERED=form.zero_centered,
            SUMS_WEIGHT=has[0], SUMS_BIAS=has[1],
            ROWS=tile.rows, COLUMNS=tile.columns, num_warps=min(32, tile.warps << form.centered),
        )  # fmt: skip
    return grad_x, parts[0].sum(0), parts[1].sum(0)
