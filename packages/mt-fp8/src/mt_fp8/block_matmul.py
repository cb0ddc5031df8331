"""The product of matrices with scales of blocks, as a Triton kernel."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import torch
from torch import Tensor

from mt_fp8.qtensor import QTensor

_SIZES = (32, 64, 128)  # columns of a block that a tile may have
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def block_obstacle(a: QTensor, b: QTensor, dtype: torch.dtype) -> str | None:
    """Say why the kernel can't multiply two matrices; None where it can."""
    if a.device.type != "cuda" and not _is_interpreted():
        return f"device {a.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
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


def _is_interpreted() -> bool:
    """Whether Triton, if it is imported, interprets kernels, which works on a CPU."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)
