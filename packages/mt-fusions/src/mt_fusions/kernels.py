"""The implementations of an operator for each device, and the candidate `fused`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from mt_kernels import Candidate, Registry, cpu_obstacle, eager_obstacle, triton_obstacle
from torch import Tensor


class Functions(NamedTuple):
    """The two functions of an operator.

    Attributes:
        forward: Computes the operation.
        backward: Computes its gradient.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def implementations(
    operation: str,
    *,
    cpu: Functions,
    triton: Callable[[], Functions],
    reference: Functions,
    obstacle: Callable[..., str | None] = triton_obstacle,
) -> Registry[Any]:
    """Return what an operator runs on each device.

    Args:
        operation: Name of the function that calls it.
        cpu: Blocks that stay in a CPU's cache.
        triton: Imports the functions of a Triton kernel, once one of them is called.
        reference: Plain torch, which always serves.
        obstacle: Why the Triton kernel cannot serve.
    """
    late = Functions(partial(_late, triton, "forward"), partial(_late, triton, "backward"))
    candidates = (
        Candidate("cpu", cpu, cpu_obstacle),
        Candidate("triton", late, obstacle),
        Candidate("reference", reference),
    )
    return Registry(operation, candidates)


def _late(load: Callable[[], Functions], name: str, *args: Any, **how: Any) -> Any:
    return getattr(load(), name)(*args, **how)


def fused_kernel(x: Tensor) -> str:
    """Return the name of the fused implementation for a tensor's device.

    On a CPU it is "cpu", but for fp32 "triton" in eager mode where Triton interprets kernels; other
    dtypes its interpreter does not round.
    """
    if x.device.type != "cpu":
        return "triton"
    if x.dtype != torch.float32 or torch.compiler.is_compiling():
        return "cpu"
    return "triton" if triton_obstacle(x) is None else "cpu"


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
    kernels: Registry[Any],
    drawback: Callable[..., str | None] = fused_drawback,
) -> Candidate[Callable[..., Any]]:
    """Return the candidate `fused`: a function of this package, by the kernel of the device.

    Args:
        function: It has an argument `kernel`.
        kernels: What that may be, from `implementations`.
        drawback: As of `Candidate`.
    """
    obstacle = partial(_fused_obstacle, kernels)
    return Candidate("fused", partial(_by_device, function), obstacle, drawback)


def _by_device(function: Callable[..., Any], x: Tensor, *args: Any, **how: Any) -> Any:
    return function(x, *args, **how, kernel=fused_kernel(x))


def _fused_obstacle(kernels: Registry[Any], x: Tensor, *_: Any) -> str | None:
    if torch.compiler.is_compiling():  # in a compiled graph the kernel says it when it runs
        return None
    return kernels.get(fused_kernel(x)).obstacle(x)
