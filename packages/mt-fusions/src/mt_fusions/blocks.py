"""Blocks of rows that stay in a CPU's cache between the passes over them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_ELEMENTS = 1 << 19  # of one thread: two megabytes in fp32


def row_blocks(*tensors: Tensor, elements: int = _ELEMENTS) -> Iterator[tuple[Tensor, ...]]:
    """Cut the same runs of rows out of all tensors; the first says how long rows are.

    A run has as many of its elements for each thread, but one row at least.

    Shape:
        tensors: [N, ...].
    """
    width = max(1, math.prod(tensors[0].shape[1:]))
    rows = max(1, torch.get_num_threads() * elements // width)
    return zip(*(x.split(rows) for x in tensors), strict=True)


def as_rows(x: Tensor) -> Tensor:
    """Fold all dims but the last, without a copy where strides allow, with elements in order.

    Shape:
        x: [..., n]. Returns [N, n].
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] < 2 else rows.contiguous()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
