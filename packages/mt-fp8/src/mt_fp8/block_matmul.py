"""The product of matrices with scales of blocks, as a Triton kernel."""

from __future__ import annotations

import torch
from mt_kernels import triton_obstacle
from torch import Tensor

from mt_fp8.qtensor import QTensor

_SIZES = (32, 64, 128)  # columns of a block that a tile may have
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def block_obstacle(a: QTensor, b: QTensor, dtype: torch.dtype) -> str | None:
    """Say why the kernel can't multiply two matrices; None where it can."""
    why = triton_obstacle(a.data, any_dtype=True)
    if why is not None:
        return why
    if "e2m1" in (a.scaling.format, b.scaling.format):
        return "e2m1, which it does not unpack"
    if a.scaling.hadamard or b.scaling.hadamard:
        return "a rotated operand"
    sides = [a.scaling.block, b.scaling.block]
    if not all(isinstance(side, tuple) for side in sides):
        return f"scales of {sides[0]} and {sides[1]}; it takes blocks"
    columns = {side[1] for side in sides if isinstance(side, tuple)}
    if len(columns) > 1 or not columns <= set(_SIZES):
        return f"blocks of {sorted(columns)} columns; it takes one size of {_SIZES}"
    if dtype not in _DTYPES:
        return f"a result of {dtype}"
    if a.device.type == "cuda" and torch.cuda.get_device_capability(a.device) < (8, 9):
        return "fp8 needs compute capability 8.9"
    return None


def block_matmul(a: QTensor, b: QTensor, dtype: torch.dtype) -> Tensor:
    """Return `a @ b.T`, each block of columns multiplied in tensor cores and summed in fp32.

    Shape:
        a: [M, K]. b: [N, K]. Returns [M, N].
    """
    from mt_fp8.gpu.block_matmul import launch

    out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    if out.numel():
        launch(a, b, out)
    return out
