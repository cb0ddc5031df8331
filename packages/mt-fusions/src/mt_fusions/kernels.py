"""What the kernels of this package share: the fused one of each device, and obstacles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from mt_files import AUTO as AUTO
from mt_files import kernel_for as kernel_for
from mt_kernels import Candidate, eager_obstacle
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


def fused_drawback(x: Tensor, *_: Any) -> str | None:
    """Return why the fused kernels are not the fastest, or were not timed."""
    if x.device.type == "cpu":
        return eager_obstacle() or "slower on a CPU than the next"
    return eager_obstacle() or f"not timed yet on {x.device.type}"


def accelerator_drawback(x: Tensor, *_: Any) -> str | None:
    """Return why torch's own fused kernel is not the fastest."""
    return eager_obstacle() or ("slow on a CPU" if x.device.type == "cpu" else None)


def fused(
    function: Callable[..., Any],
    kernels: Sequence[Kernel],
    drawback: Callable[..., str | None] = fused_drawback,
) -> Candidate[Callable[..., Any]]:
    """Return the candidate `fused`: a function of this package, by the kernel of the device.

    Args:
        function: It has an argument `kernel`.
        kernels: What that may be.
        drawback: As of `Candidate`.
    """
    obstacle = partial(_fused_obstacle, kernels)
    return Candidate("fused", partial(_by_device, function), obstacle, drawback)


def _by_device(function: Callable[..., Any], x: Tensor, *args: Any, **how: Any) -> Any:
    return function(x, *args, **how, kernel=fused_kernel(x))


def _fused_obstacle(kernels: Sequence[Kernel], x: Tensor, *_: Any) -> str | None:
    if torch.compiler.is_compiling():  # in a compiled graph the kernel says it when it runs
        return None
    name = fused_kernel(x)
    return next(kernel.obstacle(x) for kernel in kernels if kernel.name == name)
