"""Candidates for one operation, of which the first that can serve is taken, or a named one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import mt_files
import torch
from mt_files import AUTO, Candidate, UserError
from mt_fusions import fused_kernel, obstacles
from torch import Tensor

R = TypeVar("R")
C = TypeVar("C", bound=Candidate)


def serves(*_: Any) -> None:
    """Have no obstacle: what a plain form says."""


@dataclass(frozen=True)
class Kernel(Generic[R]):
    """One way to compute an operation.

    Attributes:
        name: In messages, and to ask for it.
        run: Computes it.
        obstacle: Why it can't serve these arguments; None where it serves.
        drawback: Why another is better, so that it has to be asked for; None where it may be the
            best.
    """

    name: str
    run: Callable[..., R]
    obstacle: Callable[..., str | None]
    drawback: Callable[..., str | None] = serves


class KernelChoice(NamedTuple):
    """What computes an operation, and why.

    Attributes:
        operation: A field of `Kernels`.
        kernel: The name of what computes it.
        reason: That it was asked for, or why those before it were not taken.
    """

    operation: str
    kernel: str
    reason: str


class KernelError(UserError, ValueError):
    """A kernel that was asked for does not serve, or none does."""


@runtime_checkable
class ChoosesKernels(Protocol):
    """A module some of whose operations have several kernels."""

    def kernel_choices(self, like: Tensor) -> Iterator[KernelChoice]:
        """Say what computes them for tensors of the device and dtype of `like`.

        Raises:
            ValueError: A kernel that was asked for does not serve.
        """
        ...


def kernel_for(kernels: Sequence[C], name: str, *args: Any) -> C:
    """Return the kernel of a name, or for "auto" the first that serves and has no drawback.

    Raises:
        ValueError: There is none of this name, or it does not serve, or none does; the message has
            the reasons.
    """
    if name == AUTO:
        kernels = [kernel for kernel in kernels if _drawback(kernel, *args) is None]
    return mt_files.kernel_for(kernels, name, *args)


def _drawback(kernel: Candidate, *args: Any) -> str | None:
    return kernel.drawback(*args) if isinstance(kernel, Kernel) else None


def chosen_kernel(operation: str, kernels: Sequence[C], name: str, *args: Any) -> C:
    """Return `kernel_for`, whose message names the field of `Kernels`.

    Raises:
        KernelError: As of `kernel_for`.
    """
    try:
        return kernel_for(kernels, name, *args)
    except ValueError as error:
        raise KernelError(f"kernels.{operation}: {error}") from error


def choice_of(operation: str, kernels: Sequence[Candidate], name: str, *args: Any) -> KernelChoice:
    """Say which kernel computes an operation for some arguments, and why.

    Raises:
        KernelError: As of `chosen_kernel`.
    """
    chosen = chosen_kernel(operation, kernels, name, *args)
    if name != AUTO:
        return KernelChoice(operation, chosen.name, "asked for")
    before = kernels[: [kernel.name for kernel in kernels].index(chosen.name)]
    reasons = (f"{k.name}: {k.obstacle(*args) or _drawback(k, *args)}" for k in before)
    return KernelChoice(operation, chosen.name, "; ".join(reasons) or "the first that serves")


def distinct(choices: Iterable[KernelChoice]) -> tuple[KernelChoice, ...]:
    """Return each choice once, in their order."""
    return tuple(dict.fromkeys(choices))


def eager_obstacle(*_: Any) -> str | None:
    """Refuse a compiler, which fuses the plain form itself."""
    return "torch.compile fuses the plain form" if torch.compiler.is_compiling() else None


def eager_cpu_obstacle(x: Tensor, *_: Any) -> str | None:
    """Refuse a compiler and other devices than the CPU."""
    return eager_obstacle() or (None if x.device.type == "cpu" else f"device {x.device.type}")


def accelerator_drawback(x: Tensor, *_: Any) -> str | None:
    """Prefer others under a compiler, and on the CPU, where torch's fused kernel is slow."""
    return eager_obstacle() or ("slow on a CPU" if x.device.type == "cpu" else None)


def fused_obstacle(operation: str, x: Tensor) -> str | None:
    """Why mt-fusions has no fused kernel of an operation for a tensor.

    In a compiled graph the kernel says it itself, when it runs.
    """
    if torch.compiler.is_compiling():
        return None
    return obstacles(operation, x)[fused_kernel(x)]


def fused_drawback(x: Tensor, *_: Any) -> str | None:
    """Why mt-fusions' kernels have to be asked for: where they are slower, or were not timed."""
    if x.device.type == "cpu":
        return eager_obstacle() or "slower on a CPU than the next"
    return eager_obstacle() or f"not timed yet on {x.device.type}"
