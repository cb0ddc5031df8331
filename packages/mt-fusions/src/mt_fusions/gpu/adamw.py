"""AdamW in Triton: one launch for all tensors, whose addresses stand in a table."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_CHUNK = 1 << 16  # of one program, so that tables are short
_NAMES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_NUMBERS = ("shrink", "rate", "rest_1", "beta_2", "rest_2", "second", "eps")


@triton.jit(do_not_specialize=_NUMBERS)
def _kernel(
    TABLE, CHUNKS, FACTOR, shrink, rate, rest_1, beta_2, rest_2, second, eps,
    PARAM: tl.constexpr, GRAD: tl.constexpr, HAS_MASTER: tl.constexpr,
    HAS_FACTOR: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A row of TABLE has a tensor's addresses and its size, a row of CHUNKS a tensor and a start.
    tensor = TABLE + tl.load(CHUNKS + 2 * tl.program_id(0)) * 6
    first = tl.load(CHUNKS + 2 * tl.program_id(0) + 1)
    size = tl.load(tensor + 5)
    p_at = tl.load(tensor).to(tl.pointer_type(PARAM))
    g_at = tl.load(tensor + 1).to(tl.pointer_type(GRAD))
    m_at = tl.load(tensor + 2).to(tl.pointer_type(tl.float32))
    v_at = tl.load(tensor + 3).to(tl.pointer_type(tl.float32))
    w_at = p_at
    if HAS_MASTER:
        w_at = tl.load(tensor + 4).to(tl.pointer_type(tl.float32))
    factor = 1.0
    if HAS_FACTOR:
        factor = tl.load(FACTOR).to(tl.float32)
    for start in range(first, tl.minimum(first + CHUNK, size), BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < size
        g = tl.load(g_at + at, mask=here, other=0.0).to(tl.float32) * factor
        m = tl.load(m_at + at, mask=here, other=0.0)
        v = tl.load(v_at + at, mask=here, other=0.0)
        w = tl.load(w_at + at, mask=here, other=0.0)
        m += (g - m) * rest_1
        v = v * beta_2 + g * g * rest_2
        w = w * shrink - rate * (m / (tl.sqrt(v) / second + eps))
        tl.store(m_at + at, m, mask=here)
        tl.store(v_at + at, v, mask=here)
        tl.store(w_at + at, w, mask=here)
        if HAS_MASTER:
            tl.store(p_at + at, w.to(PARAM), mask=here)


def adamw_(
    state: Any, factor: Tensor | None, numbers: Sequence[float], corrections: tuple[float, float]
) -> None:
    """Step all tensors in place, with one launch per combination of dtypes."""
    lr, beta_1, beta_2, eps, decay = numbers
    # Differences from 1 are made in fp64: in fp32 they would have four digits.
    how = 1 - lr * decay, lr / corrections[0], 1 - beta_1, beta_2, 1 - beta_2, corrections[1], eps
    kinds: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index, (p, g) in enumerate(zip(state.params, state.grads, strict=True)):
        kinds.setdefault((p.dtype, g.dtype), []).append(index)
    for (param, grad), indices in kinds.items():
        table, chunks = [], []
        for row, index in enumerate(indices):
            tensors = [x[index] for x in state[:4]]
            master = state.masters[index] if state.masters else tensors[0]
            size = master.numel()
            table.append([*(x.data_ptr() for x in (*tensors, master)), size])
            chunks += [[row, start] for start in range(0, size, _CHUNK)]
        device = state.params[0].device
        places = [torch.tensor(x, dtype=torch.int64, device=device) for x in (table, chunks)]
        if chunks:
            _kernel[(len(chunks),)](
                *places, factor, *how,
                PARAM=_NAMES[param], GRAD=_NAMES[grad], HAS_MASTER=bool(state.masters),
                HAS_FACTOR=factor is not None, CHUNK=_CHUNK, BLOCK=_BLOCK, num_warps=8,
            )  # fmt: skip
