"""Gated activations in Triton: a program goes along a few rows, a block of columns at a time."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
from __future__ import annotations

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
    X, U, Y, x_stride, u_stride, rows, size, clamp, offset,
    KIND: tl.constexpr, HAS_UP: tl.constexpr, HAS_CLAMP: tl.constexpr,
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
    at = row[:, None] * size + column[None, :]
    tl.store(Y + at, value.to(Y.dtype.element_ty), mask=here)


@triton.jit
def _backward_kernel(
    G, X, U, DX, DU, x_stride, u_stride, rows, size, clamp, offset,
    KIND: tl.constexpr, HAS_UP: tl.constexpr, HAS_CLAMP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
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
            tl.store(DU + at, grad_u.to(DU.dtype.element_ty), mask=here)
            slope *= u
        tl.store(DX + at, (g * slope).to(DX.dtype.element_ty), mask=here)


def forward(gate: Tensor, up: Tensor | None, how: tuple[str, float | None, float]) -> Tensor:
    """Return the gated activation."""
    kind, clamp, offset = how
    x, u = as_rows(gate), as_rows(gate if up is None else up)
    y = gate.new_empty(gate.shape)
    rows, size = x.shape
    tile = row_tiles(min(max(size, 1), _WIDEST), _WIDEST)
    grid = triton.cdiv(rows, tile.rows), triton.cdiv(size, tile.columns)
    if y.numel():
        _forward_kernel[grid](
            x, u, y, x.stride(0), u.stride(0), rows, size, clamp or 0.0, offset,
            KIND=kind, HAS_UP=up is not None, HAS_CLAMP=clamp is not None,
            ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    return y


def backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, how: tuple[str, float | None, float]
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of gate and up."""
    kind, clamp, offset = how
    x, u, grad = as_rows(gate), as_rows(gate if up is None else up), grad.contiguous()
    grad_x = gate.new_empty(gate.shape)
    grad_u = None if up is None else up.new_empty(up.shape)
    rows, size = x.shape
    tile = row_tiles(min(max(size, 1), _WIDEST), _WIDEST)
    if grad.numel():
        _backward_kernel[(triton.cdiv(rows, tile.rows),)](
            grad, x, u, grad_x, grad_u, x.stride(0), u.stride(0), rows, size, clamp or 0.0, offset,
            KIND=kind, HAS_UP=up is not None, HAS_CLAMP=clamp is not None,
            ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    return grad_x, grad_u
