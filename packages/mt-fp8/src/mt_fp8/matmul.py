"""The product of two quantised matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from mt_files import check_type
from mt_kernels import AUTO, Candidate, Registry, Selector, triton_obstacle
from torch import Tensor

from mt_fp8.qtensor import QTensor
from mt_fp8.transformer_engine import engine_matmul, engine_obstacle

_HALF = (torch.bfloat16, torch.float16)
_FP8 = ("e4m3", "e5m2")
_BLOCK_COLUMNS = (32, 64, 128)  # of a block that a tile of the Triton kernel may have


MatmulKernel: TypeAlias = Callable[[QTensor, QTensor, Tensor | None, torch.dtype], Tensor]
"""Multiplies two matrices and adds a bias or None; the last argument is the result's dtype."""


def matmul(
    a: QTensor,
    b: QTensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernel: str | Selector[MatmulKernel] = AUTO,
) -> Tensor:
    """Return `a @ b.T + bias` for two quantised matrices, summed in fp32 and rounded once.

    The kernel `emulation` is the definition: it multiplies the dequantised values in fp32, or in
    fp64 for an fp64 result. The others differ from it by the order of the sum. If both operands are
    rotated the rotations cancel and need not be undone.

    Args:
        a: The left matrix.
        b: The right matrix, transposed.
        bias: Added to each row.
        out_dtype: Dtype of the result; None is the dtype that `a` was quantised from.
        kernel: `scaled_mm` (torch's), `te` (Transformer Engine's, from the extra of that name),
            `triton` or `emulation`; `auto` takes the first that serves. A selector keeps its
            choice.

    Shape:
        a: [M, K]. b: [N, K]. bias: [N]. Returns [M, N].

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Shapes don't fit, or the named kernel does not serve; the message says why.

    Example:
        >>> from mt_fp8 import matmul, quantize
        >>> a = quantize(torch.eye(2), "tensorwise")
        >>> matmul(a, a).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    check_type("a", a, QTensor)
    check_type("b", b, QTensor)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(
            f"a {tuple(a.shape)} and b {tuple(b.shape)} must be [M, K] and [N, K]: matmul "
            "multiplies a with the transpose of b"
        )
    if bias is not None and tuple(bias.shape) != (b.shape[0],):
        raise ValueError(
            f"bias {tuple(bias.shape)} must have one element for each of b's {b.shape[0]} rows"
        )
    dtype = a.dtype if out_dtype is None else out_dtype
    if isinstance(kernel, Selector):
        key = a.shape, b.shape, a.scaling, b.scaling, dtype
        return kernel.find(a, b, bias, dtype, key=key).function(a, b, bias, dtype)
    return MATMUL_KERNELS.find(kernel, a, b, bias, dtype).function(a, b, bias, dtype)


def _emulated(a: QTensor, b: QTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    rotated = a.scaling.hadamard and b.scaling.hadamard
    left, right = (x.dequantize(wide, rotated=rotated) for x in (a, b))
    return F.linear(left, right, None if bias is None else bias.to(wide)).to(dtype)


def _scaled_mm(a: QTensor, b: QTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    with_bias = bias is not None and dtype in _HALF
    y = torch._scaled_mm(
        a.data.contiguous(),
        b.data.contiguous().t(),
        scale_a=a.scales,
        scale_b=b.scales if b.scales.dim() == 0 else b.scales.t(),
        bias=bias.to(dtype) if with_bias and bias is not None else None,
        out_dtype=dtype,
    )
    return y if with_bias or bias is None else y.add_(bias)


def _scaled_mm_obstacle(
    a: QTensor, b: QTensor, bias: Tensor | None, dtype: torch.dtype
) -> str | None:
    del bias
    blocks = {a.scaling.block, b.scaling.block}
    formats = [a.scaling.format, b.scaling.format]
    if a.scaling.hadamard or b.scaling.hadamard:
        return "a rotated operand"
    if not set(formats) <= set(_FP8) or formats == ["e5m2", "e5m2"]:
        return f"{' x '.join(formats)}; it takes e4m3, and e5m2 on one side"
    if blocks not in ({"tensor"}, {"row"}) or {a.scales.dtype, b.scales.dtype} != {torch.float32}:
        return f"scales of {a.scaling.block} and {b.scaling.block}; it takes fp32 of tensor or row"
    if 0 in (*a.shape, *b.shape):
        return "an operand without elements"
    of_device = _cuda_obstacle if a.device.type == "cuda" else _cpu_obstacle
    return of_device(a, b, dtype)


def _cuda_obstacle(a: QTensor, b: QTensor, dtype: torch.dtype) -> str | None:
    major, minor = torch.cuda.get_device_capability(a.device)
    is_row, least = a.scaling.block == "row", (9, 0) if a.scaling.block == "row" else (8, 9)
    if (major, minor) < least:
        return f"compute capability {major}.{minor}, and it needs {least[0]}.{least[1]}"
    if a.shape[1] % 16 or b.shape[0] % 16:
        return f"{a.shape[1]} columns and {b.shape[0]} rows of b; it takes multiples of 16"
    allowed = (torch.bfloat16,) if is_row else (*_HALF, torch.float32)
    return None if dtype in allowed else f"a result of {dtype}"


def _cpu_obstacle(a: QTensor, b: QTensor, dtype: torch.dtype) -> str | None:
    del b
    if a.device.type != "cpu":
        return f"device {a.device.type}"
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if a.scaling.block == "row" and version < (2, 15):
        return f"rows on a CPU in torch {torch.__version__}"
    return None if dtype in (*_HALF, torch.float32) else f"a result of {dtype}"


def _triton(a: QTensor, b: QTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply each block of columns in tensor cores, and sum in fp32."""
    from mt_fp8.gpu.block_matmul import launch

    wide = torch.float32 if bias is not None else dtype
    y = torch.empty(a.shape[0], b.shape[0], dtype=wide, device=a.device)
    if y.numel():
        launch(a, b, y)
    return y if bias is None else y.add_(bias).to(dtype)


def _triton_obstacle(a: QTensor, b: QTensor, bias: Tensor | None, dtype: torch.dtype) -> str | None:
    del bias
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
    if len(columns) > 1 or not columns <= set(_BLOCK_COLUMNS):
        return f"blocks of {sorted(columns)} columns; it takes one size of {_BLOCK_COLUMNS}"
    if dtype not in (*_HALF, torch.float32):
        return f"a result of {dtype}"
    if a.device.type == "cuda" and torch.cuda.get_device_capability(a.device) < (8, 9):
        return "fp8 needs compute capability 8.9"
    return None


def _triton_drawback(a: QTensor, *_: object) -> str | None:
    return "on a CPU it is interpreted, for tests" if a.device.type == "cpu" else None


# Obstacles get the arguments of the kernel.
MATMUL_KERNELS: Registry[MatmulKernel] = Registry(
    "fp8_matmul",
    (
        Candidate("scaled_mm", _scaled_mm, _scaled_mm_obstacle),
        Candidate("te", engine_matmul, engine_obstacle),
        Candidate("triton", _triton, _triton_obstacle, _triton_drawback),
        Candidate("emulation", _emulated),
    ),
)
