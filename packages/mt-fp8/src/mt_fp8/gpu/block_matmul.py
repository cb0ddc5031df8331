"""The product of matrices with scales of blocks in Triton: a tile of the result in a program."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_fp8.qtensor import QTensor


@triton.jit
def _kernel(
    A, B, A_SCALES, B_SCALES, OUT, m, n, k, blocks, a_rows, b_rows,
    INTERPRET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here, there = row < m, column < n
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    a_at = row.to(tl.int64)[:, None] * k
    b_at = column.to(tl.int64)[None, :] * k
    a_scales = A_SCALES + (row // a_rows).to(tl.int64) * blocks
    b_scales = B_SCALES + (column // b_rows).to(tl.int64) * blocks
    for block in range(blocks):
        inner = block * BLOCK + tl.arange(0, BLOCK)
        inside = inner < k
        a = tl.load(A + a_at + inner[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        b = tl.load(B + b_at + inner[:, None], mask=inside[:, None] & there[None, :], other=0.0)
        if INTERPRET:  # whose products of 8 bits are wrong
            a, b = a.to(tl.float32), b.to(tl.float32)
        product = tl.dot(a, b)
        a_scale = tl.load(a_scales + block, mask=here, other=0.0)
        b_scale = tl.load(b_scales + block, mask=there, other=0.0)
        total += product * a_scale[:, None] * b_scale[None, :]
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(OUT + at, total.to(OUT.dtype.element_ty), mask=here[:, None] & there[None, :])


def launch(a: QTensor, b: QTensor, out: Tensor) -> None:
    """Write `a @ b.T` to `out`.

    Shape:
        a: [M, K]. b: [N, K]. out: [M, N].
    """
    (m, k), n = a.shape, b.shape[0]
    (a_rows, width), (b_rows, _) = a.scaling.block, b.scaling.block
    rows = columns = 32 if out.device.type == "cpu" else 64 if width < 128 else 128
    scales = [x.steps().contiguous() for x in (a, b)]
    grid = (triton.cdiv(m, rows), triton.cdiv(n, columns))
    interpreted = bool(triton.knobs.runtime.interpret)
    target = torch.empty_like(out, dtype=torch.float32) if interpreted else out
    _kernel[grid](
        *(a.data.contiguous(), b.data.contiguous(), *scales, target),
        *(m, n, k, scales[0].shape[1], a_rows, b_rows),
        INTERPRET=interpreted, ROWS=rows, COLUMNS=columns, BLOCK=width,
        num_warps=4 if rows < 128 else 8,
    )  # fmt: skip
    if interpreted:
        out.copy_(target)  # the interpreter truncates where hardware rounds
