"""The products of a head with a block of tokens at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_fusions.blocks import wide_dtype
from mt_fusions.kernels import Kernel

_BLOCK = {"cpu": 1 << 23}  # logits: a few more rows than the products want
_LARGE_BLOCK = 1 << 29  # a gigabyte in bf16, for which products are as fast as whole


def block_size(kernel: Kernel, x: Tensor, weight: Tensor) -> int:
    """Rows of a block; all of them for the reference."""
    if kernel.name == "reference":
        return max(1, len(x))
    return max(512, _BLOCK.get(x.device.type, _LARGE_BLOCK) // len(weight))


def blocks_of(rows: int, size: int) -> list[slice]:
    """Runs of rows."""
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def logits_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`."""
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def sum_dtype(dtype: torch.dtype, rows: int, size: int) -> torch.dtype:
    """Of a sum over blocks: fp32 at least, but for one alone."""
    return dtype if rows <= size else wide_dtype(dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a product to a sum that may be wider; without a temporary where torch has a kernel."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total += a @ b
