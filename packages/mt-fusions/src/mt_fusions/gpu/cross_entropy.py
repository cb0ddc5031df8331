"""Cross entropy in Triton: a row's log-sum-exp in one pass, and its gradient in another."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 4096


@triton.jit
def _forward_kernel(
    X, LABELS, LSE, TARGET, TOTAL, stride, columns,
    WANTS_TOTAL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # The largest so far, and the sum of exponentials relative to it (Milakov & Gimelshein, 2018).
    row = tl.program_id(0).to(tl.int64)
    lowest = -3.4028234663852886e38
    high = tl.full((COLUMNS,), lowest, dtype=tl.float32)
    below = tl.zeros((COLUMNS,), dtype=tl.float32)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        here = column < columns
        x = tl.load(X + row * stride + column, mask=here, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(high, x)
        below = below * tl.exp(high - larger) + tl.exp(x - larger)
        high = larger
        if WANTS_TOTAL:
            total += tl.where(here, x, 0.0)
    largest = tl.max(high, 0)
    lse = largest + tl.log(tl.sum(below * tl.exp(high - largest), 0))
    tl.store(LSE + row, tl.maximum(lse, lowest))
    label = tl.load(LABELS + row)
    x = tl.load(X + row * stride + label, mask=label >= 0, other=0.0).to(tl.float32)
    tl.store(TARGET + row, x)
    if WANTS_TOTAL:
        tl.store(TOTAL + row, tl.sum(total, 0))


@triton.jit
def _backward_kernel(
    OUT, X, LABELS, LSE, G_LSE, G_TARGET, G_TOTAL, out_stride, stride, columns, width,
    WANTS_TOTAL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < columns
    x = tl.load(X + row * stride + column, mask=here, other=float("-inf")).to(tl.float32)
    grad = tl.exp(x - tl.load(LSE + row)) * tl.load(G_LSE + row)
    if WANTS_TOTAL:
        grad += tl.where(here, tl.load(G_TOTAL + row), 0.0)
    grad += tl.where(column == tl.load(LABELS + row), tl.load(G_TARGET + row), 0.0)
    at = OUT + row * out_stride + column
    tl.store(at, grad.to(OUT.dtype.element_ty), mask=column < width)


def forward(
    logits: Tensor, labels: Tensor, columns: int, *, wants_total: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-sum-exp, the label's logit and, if wanted, the sum of each row."""
    rows = logits.shape[0]
    lse, target = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    total = lse.new_empty(rows if wants_total else 0)
    if rows:
        _forward_kernel[(rows,)](
            logits, labels, lse, target, total, logits.stride(0), columns,
            WANTS_TOTAL=wants_total, COLUMNS=_block(columns), num_warps=8,
        )  # fmt: skip
    return lse, target, total


def fill(
    out: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    columns: int,
) -> None:
    """Write the gradient of the logits; `out` may be these."""
    rows, width = logits.shape
    grad_lse, grad_target, grad_total = (x.contiguous() for x in grads)
    block = _block(width)
    if logits.numel():
        _backward_kernel[(rows, triton.cdiv(width, block))](
            out, logits, labels, lse, grad_lse, grad_target, grad_total,
            out.stride(0), logits.stride(0), columns, width,
            WANTS_TOTAL=grad_total.numel() > 0, COLUMNS=block, num_warps=8,
        )  # fmt: skip


def _block(size: int) -> int:
    return min(_COLUMNS, max(128, 1 << (size - 1).bit_length())) if size else 128
