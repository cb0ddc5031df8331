"""Products by NVIDIA's Transformer Engine, from existing codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mt_fp8.qtensor import QTensor

_PACKAGE = "transformer_engine"
_TYPES = {"e4m3": "kFloat8E4M3", "e5m2": "kFloat8E5M2", "e2m1": "kFloat4E2M1"}
_SIDE = 128
_NVFP4_MAX = 448.0 * 6.0


def engine_matmul(a: QTensor, b: QTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `a @ b.T + bias`, as `mt_fp8.matmul` does, by Transformer Engine's `general_gemm`."""
    gemm = import_module(f"{_PACKAGE}.pytorch.cpp_extensions").general_gemm
    left, right = (_STORAGES[_kind(x)](x) for x in (a, b))
    in_product = None if bias is None or dtype == torch.float32 else bias.to(dtype)
    # Sums are kept in fp32 throughout, not in the fewer bits of the fastest accumulation.
    y = gemm(right, left, out_dtype=dtype, bias=in_product, use_split_accumulator=True)[0]
    return y if in_product is not None or bias is None else y.add_(bias)


def engine_obstacle(a: QTensor, b: QTensor, bias: Tensor | None, dtype: torch.dtype) -> str | None:
    """Return why Transformer Engine can't serve; None where it can."""
    del bias
    kinds = _kind(a), _kind(b)
    if a.scaling.hadamard != b.scaling.hadamard:
        return "one operand is rotated"
    if kinds not in _PAIRS:
        return f"scales of {a.scaling.block} and {b.scaling.block}, which it has no product for"
    if a.scaling.format == b.scaling.format == "e5m2":
        return "e5m2 x e5m2; it takes e5m2 on one side"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"a result of {dtype}"
    size = _MULTIPLES[kinds]
    if 0 in (*a.shape, *b.shape) or a.shape[1] % size or a.shape[0] % 8 or b.shape[0] % 8:
        return f"{a.shape} and {b.shape}; it takes multiples of 8 rows and {size} columns"
    return _device_obstacle(a.device, kinds) or _package_obstacle()


def _kind(x: QTensor) -> str | None:
    """Return how Transformer Engine scales such a tensor; None where it does not."""
    scaling = x.scaling
    if scaling.scale in ("fp32", "pow2") and scaling.format != "e2m1":
        return {"tensor": "tensor", (1, _SIDE): "lines", (_SIDE, _SIDE): "squares"}.get(
            scaling.block
        )
    if (scaling.scale, scaling.block) == ("e8m0", (1, 32)) and scaling.format != "e2m1":
        return "mxfp8"
    if scaling.scale == "nvfp4" and scaling.block in ((1, 16), (16, 16)):
        return "nvfp4"
    return None


_HOPPER, _BLACKWELL = ((9, 0), (9, 9)), ((10, 0), (99, 0))
_PAIRS: Mapping[tuple[str | None, str | None], tuple[tuple[int, int], tuple[int, int]]] = {
    ("tensor", "tensor"): ((8, 9), (99, 0)),
    ("lines", "squares"): _HOPPER,
    ("squares", "lines"): _HOPPER,
    ("lines", "lines"): _HOPPER,
    ("mxfp8", "mxfp8"): _BLACKWELL,
    ("nvfp4", "nvfp4"): _BLACKWELL,
}
"""Which pairs have a product, and on which compute capabilities, from and to."""
_MULTIPLES = dict.fromkeys(_PAIRS, 16) | {("mxfp8", "mxfp8"): 32, ("nvfp4", "nvfp4"): 32}


def _device_obstacle(device: torch.device, kinds: tuple[str | None, str | None]) -> str | None:
    if device.type != "cuda":
        return f"it is for CUDA, and the tensor on {device}"
    found, (least, most) = torch.cuda.get_device_capability(device), _PAIRS[kinds]
    if least <= found <= most:
        return None
    return f"compute capability {found[0]}.{found[1]}, and these scales need {least[0]}.{least[1]}"


@cache
def _package_obstacle() -> str | None:
    if find_spec(_PACKAGE) is None:
        return "Transformer Engine is not installed: pip install 'transformer-engine[pytorch]'"
    try:
        found = import_module(f"{_PACKAGE}.pytorch")
        import_module(f"{_PACKAGE}.pytorch.cpp_extensions")
    except (ImportError, OSError, RuntimeError) as error:
        return f"Transformer Engine can't be imported: {error}"
    names = ("Float8TensorStorage", "MXFP8TensorStorage", "Float8BlockwiseQTensorStorage")
    if not all(hasattr(found, name) for name in names):
        return "Transformer Engine is too old: pip install -U 'transformer-engine[pytorch]'"
    return None


def _tensor(x: QTensor) -> Any:
    return _made(
        "Float8TensorStorage",
        x,
        data=_raw(x),
        fp8_scale_inv=x.scales.view(1),
        fp8_dtype=_type_of(x),
    )


def _lines(x: QTensor) -> Any:
    # Scales lie by columns of blocks, a row of them for each.
    scales = _padded(x.scales.t(), 1, 4)
    return _rowwise("Float8BlockwiseQTensorStorage", x, scales, is_2D_scaled=False)


def _squares(x: QTensor) -> Any:
    scales = _padded(x.scales, 1, 4)
    return _rowwise("Float8BlockwiseQTensorStorage", x, scales, is_2D_scaled=True)


def _mxfp8(x: QTensor) -> Any:
    scales = _padded(x.scales.view(torch.uint8), 128, 4)
    return _rowwise("MXFP8TensorStorage", x, scales, with_gemm_swizzled_scales=False)


def _nvfp4(x: QTensor) -> Any:
    scales = x.scales.view(torch.uint8)
    if x.scaling.block == (16, 16):  # as many as for lines, the same in 16 of them
        scales = scales.repeat_interleave(16, 0)[: x.shape[0]]
    total = x.global_scale
    assert total is not None  # noqa: S101 - nvfp4 has one
    return _made(
        "NVFP4TensorStorage",
        x,
        rowwise_data=_raw(x),
        rowwise_scale_inv=_padded(scales, 128, 4),
        columnwise_data=None,
        columnwise_scale_inv=None,
        amax_rowwise=(total * _NVFP4_MAX).view(1),
        amax_columnwise=None,
        fp4_dtype=_type_of(x),
        quantizer=None,
        with_gemm_swizzled_scales=False,
    )


def _rowwise(name: str, x: QTensor, scales: Tensor, **own: Any) -> Any:
    return _made(
        name,
        x,
        rowwise_data=_raw(x),
        rowwise_scale_inv=scales,
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=_type_of(x),
        quantizer=None,
        **own,
    )


def _made(name: str, x: QTensor, **fields: Any) -> Any:
    kind = getattr(import_module(f"{_PACKAGE}.pytorch"), name)
    return kind(**fields, fake_dtype=x.dtype)


def _type_of(x: QTensor) -> Any:
    return getattr(import_module(f"{_PACKAGE}_torch").DType, _TYPES[x.scaling.format])


def _raw(x: QTensor) -> Tensor:
    return x.data.contiguous().view(torch.uint8)


def _padded(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Fill up with zeros to multiples."""
    missing = 0, -scales.shape[1] % columns, 0, -scales.shape[0] % rows
    return torch.nn.functional.pad(scales, missing).contiguous()


_STORAGES: Mapping[str | None, Callable[[QTensor], Any]] = {
    "tensor": _tensor,
    "lines": _lines,
    "squares": _squares,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}
