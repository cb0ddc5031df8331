"""Rotary position embedding in Triton: a program turns some heads of one token."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 2048


@triton.jit
def _kernel(
    X, COS, SIN, Y, token_stride, head_stride, tokens, heads, size, width, table_batch,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = token % (tokens * table_batch)  # tables of one row serve every sequence of a batch
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    there = pair < width // 2
    here = (head < heads)[:, None] & there[None, :]
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + width // 2
    cos_a = tl.load(COS + row * width + first, mask=there, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(COS + row * width + second, mask=there, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(SIN + row * width + first, mask=there, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(SIN + row * width + second, mask=there, other=0.0).to(tl.float32)[None, :]
    x = X + token * token_stride + head[:, None] * head_stride
    y = Y + token * heads * size + head[:, None] * size
    a = tl.load(x + first[None, :], mask=here, other=0.0).to(tl.float32)
    b = tl.load(x + second[None, :], mask=here, other=0.0).to(tl.float32)
    if BACK:
        turned_a = a * cos_a + b * sin_b
        turned_b = b * cos_b - a * sin_a
    else:
        turned_a = a * cos_a - b * sin_a
        turned_b = b * cos_b + a * sin_b
    tl.store(y + first[None, :], turned_a.to(Y.dtype.element_ty), mask=here)
    tl.store(y + second[None, :], turned_b.to(Y.dtype.element_ty), mask=here)
    if REST:
        rest = width + tl.arange(0, REST)
        left = (head < heads)[:, None] & (rest < size)[None, :]
        tl.store(y + rest[None, :], tl.load(x + rest[None, :], mask=left), mask=left)


def turn(x: Tensor, cos: Tensor, sin: Tensor, how: Sequence[bool]) -> Tensor:
    """Turn the first channels of each head."""
    batch, tokens, heads, size = x.shape
    rows = x.reshape(batch * tokens, heads, size)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    y, width = x.new_empty(x.shape), cos.shape[-1]
    half = max(16, triton.next_power_of_2(max(1, width // 2)))
    count = min(triton.next_power_of_2(max(1, heads)), max(1, _ELEMENTS // half))
    if y.numel():
        _kernel[(batch * tokens, triton.cdiv(heads, count))](
            rows, cos.contiguous(), sin.contiguous(), y, rows.stride(0), rows.stride(1),
            tokens, heads, size, width, cos.shape[0],
            INTERLEAVED=how[0], BACK=how[1], HEADS=count, HALF=half,
            REST=triton.next_power_of_2(size - width) if size > width else 0, num_warps=4,
        )  # fmt: skip
    return y
