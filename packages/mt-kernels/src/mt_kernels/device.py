"""Obstacles that a device, a compiler or a missing Triton gives."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cpu_obstacle(x: Tensor, *_: Any) -> str | None:
    """Refuse other devices than the CPU."""
    return None if x.device.type == "cpu" else f"it is for the CPU, and the tensor on {x.device}"


def eager_obstacle(*_: Any) -> str | None:
    """Refuse `torch.compile`, which fuses a plain implementation itself."""
    return "torch.compile fuses the plain form" if torch.compiler.is_compiling() else None


def triton_obstacle(x: Tensor, *_: Any, any_dtype: bool = False) -> str | None:
    """Return why Triton (compiled or interpreted) cannot compute a tensor, or None.

    Args:
        x: The tensor.
        any_dtype: Accept any dtype, not only those with fp32 arithmetic.
    """
    if not _is_installed():
        return "triton is not installed"
    if not any_dtype and x.dtype not in _DTYPES:
        return f"it computes in fp32, and the tensor is {x.dtype}"
    if x.device.type == "cuda" or triton_is_interpreted():
        return None
    return f"it is for CUDA, and the tensor on {x.device}"


def triton_is_interpreted() -> bool:
    """Return whether Triton is imported and interprets kernels, which works on a CPU."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
