"""Candidates for one operation, of which the first that can serve is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from mt_files import AUTO as AUTO
from mt_files import kernel_for as kernel_for
from mt_kernels import cpu_obstacle as cpu_obstacle
from mt_kernels import serves as serves
from mt_kernels import triton_obstacle as triton_obstacle
from torch import Tensor


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
