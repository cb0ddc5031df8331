"""Candidates for one operation, of which the first that can serve is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


@dataclass(frozen=True)
class Kernel(Generic[R]):
    """One way to compute an operation.

    Attributes:
        name: In messages.
        run: Computes it.
        obstacle: Why it can't or should not serve these arguments; None where it serves.
    """

    name: str
    run: Callable[..., R]
    obstacle: Callable[..., str | None]


def kernel_for(kernels: Sequence[Kernel[R]], *args: Any) -> Kernel[R]:
    """Return the first kernel that serves some arguments.

    Raises:
        ValueError: None does; the message has each one's reason.
    """
    reasons = []
    for kernel in kernels:
        why = kernel.obstacle(*args)
        if why is None:
            return kernel
        reasons.append(f"{kernel.name}: {why}")
    raise ValueError(f"no kernel serves this ({'; '.join(reasons)}); add a plain one")


def serves(*_: Any) -> None:
    """Have no obstacle: what a plain form says."""


def eager_obstacle(*_: Any) -> str | None:
    """Refuse a compiler, which fuses the plain form itself."""
    return "torch.compile fuses the plain form" if torch.compiler.is_compiling() else None


def eager_cpu_obstacle(x: Tensor, *_: Any) -> str | None:
    """Refuse a compiler and other devices than the CPU."""
    return eager_obstacle() or (None if x.device.type == "cpu" else f"device {x.device.type}")


def eager_accelerator_obstacle(x: Tensor, *_: Any) -> str | None:
    """Refuse a compiler, and the CPU, where torch's fused kernel is slow."""
    return eager_obstacle() or ("slow on a CPU" if x.device.type == "cpu" else None)
