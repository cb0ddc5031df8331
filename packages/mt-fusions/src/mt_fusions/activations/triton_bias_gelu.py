"""GELU of a sum with a bias in Triton: a program has a tile, or backward every n-th of a column."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_fusions.activations.triton_gated import _activation
from mt_fusions.blocks import as_rows
from mt_fusions.gpu.launch import programs, row_tiles

_WIDEST = 256


@triton.jit
def _forward_kernel(
    X, B, Y, x_stride, rows, size,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < rows)[:, None] & (column < size)[None, :]
    x = tl.load(X + row[:, None] * x_stride + column[None, :], mask=here, other=0.0).to(tl.float32)
    x += tl.load(B + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    value, _ = _activation(x, KIND)
    tl.store(Y + row[:, None] * size + column[None, :], value.to(Y.dtype.element_ty), mask=here)


@triton.jit
def _backward_kernel(
    G, X, B, DX, DB, x_stride, rows, size,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    b = tl.load(B + column, mask=column < size, other=0.0).to(tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.arange(0, ROWS).to(tl.int64) + tile * ROWS
        here = (row < rows)[:, None] & (column < size)[None, :]
        at = row[:, None] * size + column[None, :]
        g = tl.load(G + at, mask=here, other=0.0).to(tl.float32)
        x_at = row[:, None] * x_stride + column[None, :]
        x = tl.load(X + x_at, mask=here, other=0.0).to(tl.float32)
        _, slope = _activation(x + b[None, :], KIND)
        g *= slope
        total += g
        tl.store(DX + at, g.to(DX.dtype.element_ty), mask=here)
    of_program = DB + tl.program_id(0).to(tl.int64) * size + column
    tl.store(of_program, tl.sum(total, 0), mask=column < size)


def forward(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """Return the GELU of the sum."""
    own, y = as_rows(x), x.new_empty(x.shape)
    rows, size = own.shape
    tile = row_tiles(min(max(size, 1), _WIDEST))
    if y.numel():
        _forward_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(size, tile.columns))](
            own, bias.contiguous(), y, own.stride(0), rows, size,
            KIND=kind, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    return y


def backward(grad: Tensor, x: Tensor, bias: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and, in fp32, of the bias."""
    own, grad, grad_x = as_rows(x), grad.contiguous(), x.new_empty(x.shape)
    rows, size = own.shape
    tile = row_tiles(min(max(size, 1), _WIDEST))
    count = programs(triton.cdiv(rows, tile.rows), x.device)
    parts = x.new_empty(count, size, dtype=torch.float32)
    if grad.numel():
        _backward_kernel[(count, triton.cdiv(size, tile.columns))](
            grad, own, bias.contiguous(), grad_x, parts, own.stride(0), rows, size,
            KIND=kind, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    return grad_x, parts.sum(0)
