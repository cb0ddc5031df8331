"""Whether Triton can serve a tensor."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def triton_obstacle(x: Tensor) -> str | None:
    """Say what keeps Triton's compiler, or its interpreter where that is on, from serving."""
    if not _has_triton():
        return "triton is not installed"
    if x.dtype not in _DTYPES:
        return f"it computes in fp32, and the tensor is {x.dtype}"
    triton = sys.modules.get("triton")
    if x.device.type == "cuda" or (triton is not None and triton.knobs.runtime.interpret):
        return None
    return f"it is for CUDA, and the tensor on {x.device}"


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
