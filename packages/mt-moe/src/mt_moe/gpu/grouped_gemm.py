"""Products of rows with their experts' weights in Triton; no number is read by the host."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rows_kernel(
    X, W, ENDS, Y, experts, inner, outer, x_stride, w_expert, w_inner, w_outer, y_stride,
    ROWS: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    """A program has a tile of rows of one expert, and of columns of the result.

    Each expert has as many tiles as its rows need; a tile finds its expert by counting those.
    """
    tile = tl.program_id(0)
    expert, first, stop, begin, before = 0, 0, 0, 0, 0
    for each in range(experts):
        end = tl.load(ENDS + each)
        tiles = (end - begin + ROWS - 1) // ROWS
        inside = (tile >= before) & (tile < before + tiles)
        expert = tl.where(inside, each, expert)
        first = tl.where(inside, begin + (tile - before) * ROWS, first)
        stop = tl.where(inside, end, stop)
        before += tiles
        begin = end
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTER + tl.arange(0, OUTER)
    here, wanted = row < stop, column < outer
    source = X + row.to(tl.int64)[:, None] * x_stride
    weight = W + expert.to(tl.int64) * w_expert + column[None, :] * w_outer
    total = tl.zeros((ROWS, OUTER), dtype=tl.float32)
    for start in range(0, inner, INNER):
        k = start + tl.arange(0, INNER)
        inside_k = k < inner
        a = tl.load(source + k[None, :], mask=here[:, None] & inside_k[None, :], other=0.0)
        b = tl.load(weight + k[:, None] * w_inner, mask=inside_k[:, None] & wanted[None, :],
                    other=0.0)  # fmt: skip
        total += tl.dot(a, b, input_precision="ieee")
    target = Y + row.to(tl.int64)[:, None] * y_stride + column[None, :]
    tl.store(target, total.to(Y.dtype.element_ty), mask=here[:, None] & wanted[None, :])


@triton.jit
def _experts_kernel(
    G, X, ENDS, D, outer, inner, g_stride, x_stride,
    ROWS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A program has a tile of one expert's weight gradient, and goes along that one's rows."""
    expert = tl.program_id(0)
    begin = tl.load(ENDS + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ENDS + expert)
    out = tl.program_id(1) * OUTER + tl.arange(0, OUTER)
    k = tl.program_id(2) * INNER + tl.arange(0, INNER)
    wanted, inside = out < outer, k < inner
    total = tl.zeros((OUTER, INNER), dtype=tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        here = row < end
        g = tl.load(G + row.to(tl.int64)[None, :] * g_stride + out[:, None],
                    mask=wanted[:, None] & here[None, :], other=0.0)  # fmt: skip
        x = tl.load(X + row.to(tl.int64)[:, None] * x_stride + k[None, :],
                    mask=here[:, None] & inside[None, :], other=0.0)  # fmt: skip
        total += tl.dot(g, x, input_precision="ieee")
    target = D + (expert.to(tl.int64) * outer + out[:, None]) * inner + k[None, :]
    tl.store(target, total.to(D.dtype.element_ty), mask=wanted[:, None] & inside[None, :])


def multiply_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return `x @ weight[e]` for the rows of each expert; other rows are not written.

    Shape:
        x: [N, in]; weight: [E, in, out], any strides; ends: [E], int32. Returns [N, out].
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    experts, inner, outer = weight.shape
    y = x.new_empty(len(x), outer)
    if y.numel():
        rows, columns, depth = _tile(len(x) // experts), _tile(outer), _tile(inner, 64)
        tiles = triton.cdiv(len(x), rows) + experts
        _rows_kernel[(tiles, triton.cdiv(outer, columns))](
            x, weight, ends, y, experts, inner, outer, x.stride(0), *weight.stride(), y.stride(0),
            ROWS=rows, INNER=depth, OUTER=columns, num_warps=4,
        )  # fmt: skip
    return y


def multiply_experts(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return `grad.T @ x` over the rows of each expert; zeros for one without.

    Shape:
        grad: [N, out]; x: [N, in]; ends: [E], int32. Returns [E, out, in].
    """
    grad, x = (each if each.stride(-1) == 1 else each.contiguous() for each in (grad, x))
    outer, inner, experts = grad.shape[1], x.shape[1], len(ends)
    out = torch.empty(experts, outer, inner, dtype=x.dtype, device=x.device)
    if out.numel():
        columns, depth = _tile(outer), _tile(inner)
        _experts_kernel[(experts, triton.cdiv(outer, columns), triton.cdiv(inner, depth))](
            grad, x, ends, out, outer, inner, grad.stride(0), x.stride(0),
            ROWS=_tile(len(x) // experts, 64), OUTER=columns, INNER=depth, num_warps=4,
        )  # fmt: skip
    return out


def _tile(size: int, most: int = 128) -> int:
    return min(most, max(16, triton.next_power_of_2(max(1, size))))
