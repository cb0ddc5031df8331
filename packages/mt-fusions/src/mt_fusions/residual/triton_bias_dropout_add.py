"""A bias, dropout and a residual in Triton, with the bits of the mask made in registers."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from mt_kernels import GOLDEN, MIX_1, MIX_2, key_words
from torch import Tensor

from mt_fusions.blocks import as_rows
from mt_fusions.gpu.launch import programs, row_tiles
from mt_fusions.residual.dropout import scale, threshold

_WIDEST = 256
_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(word) for word in (GOLDEN, MIX_1, MIX_2))
_NO_SPECIAL = ("key", "key_2", "limit")  # one kernel for all keys


@triton.jit
def _shift(z, BITS: tl.constexpr):
    """Shift right logically."""
    return (z.to(tl.uint64, bitcast=True) >> BITS).to(tl.int64, bitcast=True)


@triton.jit
def _kept(index, key, key_2, limit):
    z = index * _GOLDEN + key
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = z ^ key_2
    z = (z ^ _shift(z, 27)) * _MIX_2
    return _shift(z, 40) >= limit


@triton.jit(do_not_specialize=_NO_SPECIAL)
def _forward_kernel(
    X, B, RESIDUAL, FIRST, Y, x_stride, residual_stride, rows, size, key, key_2, limit, factor,
    HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < rows)[:, None] & (column < size)[None, :]
    x = tl.load(X + row[:, None] * x_stride + column[None, :], mask=here, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(B + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    if DROPS:
        index = tl.load(FIRST + row, mask=row < rows, other=0)[:, None] + column[None, :]
        x = tl.where(_kept(index, key, key_2, limit), x * factor, 0.0)
    at = row[:, None] * residual_stride + column[None, :]
    x += tl.load(RESIDUAL + at, mask=here, other=0.0).to(tl.float32)
    tl.store(Y + row[:, None] * size + column[None, :], x.to(Y.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=_NO_SPECIAL)
def _backward_kernel(
    G, FIRST, DX, DB, rows, size, key, key_2, limit, factor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.arange(0, ROWS).to(tl.int64) + tile * ROWS
        here = (row < rows)[:, None] & (column < size)[None, :]
        at = row[:, None] * size + column[None, :]
        g = tl.load(G + at, mask=here, other=0.0).to(tl.float32)
        index = tl.load(FIRST + row, mask=row < rows, other=0)[:, None] + column[None, :]
        g = tl.where(_kept(index, key, key_2, limit), g * factor, 0.0)
        total += g
        tl.store(DX + at, g.to(DX.dtype.element_ty), mask=here)
    of_program = DB + tl.program_id(0).to(tl.int64) * size + column
    tl.store(of_program, tl.sum(total, 0), mask=column < size)


def _numbers(how: tuple[float, int]) -> tuple[int, int, int, float]:
    probability, key = how
    return *key_words(key), threshold(probability), scale(probability, torch.float32)


def forward(
    x: Tensor, bias: Tensor | None, residual: Tensor, first: Tensor | None, how: tuple[float, int]
) -> Tensor:
    """Return the sum."""
    own, rest, y = as_rows(x), as_rows(residual), x.new_empty(x.shape)
    rows, size = own.shape
    tile = row_tiles(min(size, _WIDEST))
    bias = None if bias is None else bias.contiguous()
    index = None if first is None else first.reshape(-1).contiguous()
    if y.numel():
        _forward_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(size, tile.columns))](
            own, bias, rest, index, y, own.stride(0), rest.stride(0), rows, size, *_numbers(how),
            HAS_BIAS=bias is not None, DROPS=index is not None,
            ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    return y


def backward(grad: Tensor, first: Tensor, how: tuple[float, int]) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and, in fp32, of the bias."""
    grad = grad.contiguous()
    own, grad_x = as_rows(grad), torch.empty_like(grad)
    rows, size = own.shape
    tile = row_tiles(min(size, _WIDEST))
    count = programs(triton.cdiv(rows, tile.rows), grad.device)
    parts = grad.new_empty(count, size, dtype=torch.float32)
    if grad.numel():
        _backward_kernel[(count, triton.cdiv(size, tile.columns))](
            own, first.reshape(-1).contiguous(), grad_x, parts, rows, size, *_numbers(how),
            ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    return grad_x, parts.sum(0)
