"""Candidates for one operation, of which the first that can serve is taken."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from mt_files import AUTO as AUTO
from mt_files import kernel_for as kernel_for
from torch import Tensor

_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way to compute an operation and its gradient.

    Attributes:
        name: In messages, and to ask for it.
        forward: Computes the operation.
        backward: Computes its gradient.
        obstacle: Why it can't serve these arguments; None where it serves.
    """

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    obstacle: Callable[..., str | None]


def serves(*_: Any) -> None:
    """Have no obstacle: what a reference says."""


def cpu_obstacle(x: Tensor, *_: Any) -> str | None:
    """Refuse other devices than the CPU."""
    return None if x.device.type == "cpu" else f"it is for the CPU, and the tensor on {x.device}"


def triton_obstacle(x: Tensor, *_: Any) -> str | None:
    """Refuse what Triton's compiler, or its interpreter where that is on, does not compute."""
    if not _has_triton():
        return "triton is not installed"
    if x.dtype not in _TRITON_DTYPES:
        return f"it computes in fp32, and the tensor is {x.dtype}"
    if x.device.type == "cuda" or _is_interpreted():
        return None
    return f"it is for CUDA, and the tensor on {x.device}"


def fused_kernel(x: Tensor) -> str:
    """Name the kernel that is not the reference and is made for a tensor's device.

    On a CPU it is "cpu", but for fp32 "triton" in eager mode where Triton interprets kernels; other
    dtypes its interpreter does not round.
    """
    if x.device.type != "cpu":
        return "triton"
    if x.dtype != torch.float32 or torch.compiler.is_compiling():
        return "cpu"
    return "triton" if triton_obstacle(x) is None else "cpu"


def width_obstacle(width: int, limit: int = 16384) -> str | None:
    """Refuse rows that one program can't hold in registers."""
    return None if width <= limit else f"rows of {width} elements are longer than {limit}"


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _is_interpreted() -> bool:
    """Whether Triton, if it is imported, interprets kernels, which works on a CPU."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)
