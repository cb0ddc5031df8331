"""Rows of tokens in Triton: a program has a token and a block of columns, or all of them."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_fusions.blocks import as_rows

_COLUMNS = 1024


@triton.jit
def _spread_kernel(
    X, PLACES, W, Y, x_stride, choices, size, HAS_WEIGHTS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < size
    x = tl.load(X + token * x_stride + column, mask=here, other=0.0).to(tl.float32)
    for choice in range(choices):
        slot = token * choices + choice
        place = tl.load(PLACES + slot).to(tl.int64)
        y = x
        if HAS_WEIGHTS:
            y = x * tl.load(W + slot).to(tl.float32)
        tl.store(Y + place * size + column, y.to(Y.dtype.element_ty), mask=here)


@triton.jit
def _combine_kernel(
    X, PLACES, W, Y, x_stride, choices, size, HAS_WEIGHTS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < size
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for choice in range(choices):
        slot = token * choices + choice
        place = tl.load(PLACES + slot).to(tl.int64)
        x = tl.load(X + place * x_stride + column, mask=here, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            x *= tl.load(W + slot).to(tl.float32)
        total += x
    tl.store(Y + token * size + column, total.to(Y.dtype.element_ty), mask=here)


@triton.jit
def _dots_kernel(X, G, PLACES, D, x_stride, g_stride, choices, size, COLUMNS: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    token = slot // choices
    place = tl.load(PLACES + slot).to(tl.int64)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, size, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        here = column < size
        x = tl.load(X + place * x_stride + column, mask=here, other=0.0).to(tl.float32)
        g = tl.load(G + token * g_stride + column, mask=here, other=0.0).to(tl.float32)
        total += x * g
    tl.store(D + slot, tl.sum(total, 0))


def spread(x: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Return each token's row, times the weight, at all of its places."""
    y = x.new_empty(places.numel(), x.shape[1])
    _launch(_spread_kernel, x, places, weights, y)
    return y


def combine(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Return the weighted sum over each token's places."""
    y = rows.new_empty(places.shape[0], rows.shape[1])
    _launch(_combine_kernel, rows, places, weights, y)
    return y


def _launch(
    kernel: triton.JITFunction, x: Tensor, places: Tensor, weights: Tensor | None, y: Tensor
) -> None:
    own, size = as_rows(x), x.shape[1]
    block = _columns(size)
    if y.numel():
        kernel[(places.shape[0], triton.cdiv(size, block))](
            own, places.contiguous(), None if weights is None else weights.contiguous(), y,
            own.stride(0), places.shape[1], size,
            HAS_WEIGHTS=weights is not None, COLUMNS=block, num_warps=4,
        )  # fmt: skip


def _dots(rows: Tensor, grad: Tensor, places: Tensor) -> Tensor:
    """Return, in fp32, the product of each token's gradient with each of its rows."""
    out = rows.new_empty(places.shape, dtype=torch.float32)
    own, g = as_rows(rows), as_rows(grad)
    if out.numel():
        _dots_kernel[(places.numel(),)](
            own, g, places.contiguous(), out, own.stride(0), g.stride(0), places.shape[1],
            rows.shape[1], COLUMNS=_columns(rows.shape[1]), num_warps=4,
        )  # fmt: skip
    return out


def combine_backward(
    grad: Tensor, rows: Tensor | None, places: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and, in fp32, of weights; the latter empty without rows."""
    if rows is None:
        return spread(grad, places, weights), grad.new_empty(0, dtype=torch.float32)
    return spread(grad, places, weights), _dots(rows, grad, places)


def _columns(size: int) -> int:
    return min(_COLUMNS, max(16, triton.next_power_of_2(max(1, size))))
