"""Gated activations in Triton: a program goes along a few rows, a block of columns at a time."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_fusions.blocks import as_rows
from mt_fusions.gpu.launch import row_tiles

_WIDEST = 1024


@triton.jit
def _activation(x, KIND: tl.constexpr):
    """The activation and its slope."""
    if KIND == "silu":
        share = tl.sigmoid(x)
        value = x * share
        slope = share + value * (1 - share)
    elif KIND == "gelu_quick":
        share = tl.sigmoid(1.702 * x)
        value = x * share
        slope = share + 1.702 * value * (1 - share)
    elif KIND == "gelu":
        share = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        value = x * share
        slope = share + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif KIND == "gelu_tanh":  # (1 + tanh u) / 2 is the sigmoid of 2 u
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        value = x * share
        inner = 1.5957691216057308 * (1 + 0.134145 * x * x)
        slope = share + value * (1 - share) * inner
    else:
        value = tl.maximum(x, 0.0)
        slope = 2 * value
        value *= value
    return value, slope


@triton.jit
def _forward_kernel(
    X, U, W, Y, x_stride, u_stride, rows, size, clamp, offset,
    KIND: tl.constexpr, HAS_UP: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_CLAMP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < rows)[:, None] & (column < size)[None, :]
    x = tl.load(X + row[:, None] * x_stride + column[None, :], mask=here, other=0.0).to(tl.float32)
    if HAS_CLAMP:
        x = tl.minimum(x, clamp)
    value, _ = _activation(x, KIND)
    if HAS_UP:
        at = row[:, None] * u_stride + column[None, :]
        u = tl.load(U + at, mask=here, other=0.0).to(tl.float32)
        if HAS_CLAMP:
            u = tl.minimum(tl.maximum(u, -clamp), clamp)
        value *= u + offset
    if HAS_WEIGHT:
        value *= tl.load(W + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    at = row[:, None] * size + column[None, :]
    tl.store(Y + at, value.to(Y.dtype.element_ty), mask=here)


@triton.jit
def _backward_kernel(
    G, X, U, W, DX, DU, DW, x_stride, u_stride, rows, size, clamp, offset,
    KIND: tl.constexpr, HAS_UP: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_CLAMP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if HAS_WEIGHT:
        w = tl.load(W + row, mask=row < rows, other=0.0).to(tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, size, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        here = (row < rows)[:, None] & (column < size)[None, :]
        at = row[:, None] * size + column[None, :]
        g = tl.load(G + at, mask=here, other=0.0).to(tl.float32)
        x_at = row[:, None] * x_stride + column[None, :]
        x = tl.load(X + x_at, mask=here, other=0.0).to(tl.float32)
        if HAS_CLAMP:
            value, slope = _activation(tl.minimum(x, clamp), KIND)
            slope = tl.where(x > clamp, 0.0, slope)
        else:
            value, slope = _activation(x, KIND)
        if HAS_UP:
            u_at = row[:, None] * u_stride + column[None, :]
            u = tl.load(U + u_at, mask=here, other=0.0).to(tl.float32)
            grad_u = g * value
            if HAS_CLAMP:
                grad_u = tl.where(tl.abs(u) > clamp, 0.0, grad_u)
                u = tl.minimum(tl.maximum(u, -clamp), clamp)
            u += offset
            if HAS_WEIGHT:
                grad_u *= w[:, None]
            tl.store(DU + at, grad_u.to(DU.dtype.element_ty), mask=here)
            value *= u
            slope *= u
        if HAS_WEIGHT:
            total += tl.sum(g * value, 1)
            slope *= w[:, None]
        tl.store(DX + at, (g * slope).to(DX.dtype.element_ty), mask=here)
    if HAS_WEIGHT:
        tl.store(DW + row, total, mask=row < rows)


def forward(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor | None,
    how: tuple[str, float | None, float],
) -> Tensor:
    """Return the gated activation."""
    kind, clamp, offset = how
    x, u = as_rows(gate), as_rows(gate if up is None else up)
    y = gate.new_empty(gate.shape)
    rows, size = x.shape
    tile = row_tiles(min(max(size, 1), _WIDEST), _WIDEST)
    grid = triton.cdiv(rows, tile.rows), triton.cdiv(size, tile.columns)
    if y.numel():
        _forward_kernel[grid](
            x, u, _rows(weight), y, x.stride(0), u.stride(0), rows, size, clamp or 0.0, offset,
            KIND=kind, HAS_UP=up is not None, HAS_WEIGHT=weight is not None,
            HAS_CLAMP=clamp is not None,
            ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    return y


def backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor | None,
    how: tuple[str, float | None, float],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of gate, up and, in fp32, the weight."""
    kind, clamp, offset = how
    x, u, grad = as_rows(gate), as_rows(gate if up is None else up), grad.contiguous()
    grad_x = gate.new_empty(gate.shape)
    grad_u = None if up is None else up.new_empty(up.shape)
    grad_w = None
    if weight is not None:
        grad_w = weight.new_zeros(weight.shape, dtype=torch.float32)
    rows, size = x.shape
    tile = row_tiles(min(max(size, 1), _WIDEST), _WIDEST)
    if grad.numel():
        _backward_kernel[(triton.cdiv(rows, tile.rows),)](
            grad, x, u, _rows(weight), grad_x, grad_u, grad_w, x.stride(0), u.stride(0),
            rows, size, clamp or 0.0, offset,
            KIND=kind, HAS_UP=up is not None, HAS_WEIGHT=weight is not None,
            HAS_CLAMP=clamp is not None,
            ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    return grad_x, grad_u, grad_w


def _rows(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.reshape(-1)
