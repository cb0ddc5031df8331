"""GELU behind a projection, with its bias."""

from __future__ import annotations

import mt_fusions
import torch
from mt_tensor_parallel import ColumnParallelLinear
from torch import Tensor, nn

from mt_model.kernels.activation import activate, activation_choice
from mt_model.kernels.choice import (
    Kernel,
    KernelChoice,
    choice_of,
    chosen_kernel,
    fused_drawback,
    fused_obstacle,
    serves,
)

_FUSED = {"gelu": mt_fusions.bias_gelu, "gelu_tanh": mt_fusions.bias_gelu_tanh}


def project(linear: nn.Module, x: Tensor, kind: str, kernel: str) -> tuple[Tensor, Tensor | None]:
    """Apply a projection, and return its bias where the activation behind it adds that itself.

    Args:
        linear: In front of the activation.
        x: Its input.
        kind: Of the activation, which has no gate.
        kernel: Of `BIAS_GELU_KERNELS`, by name.

    Raises:
        ValueError: The named kernel does not serve; the message says why.
    """
    bias = _bias_of(linear, kind)
    if isinstance(bias, str):
        return linear(x), None
    chosen = chosen_kernel("activation", BIAS_GELU_KERNELS, kernel, x)
    return (linear(x, with_bias=False), bias) if chosen.name == "fused" else (linear(x), None)


def activate_with(x: Tensor, bias: Tensor | None, kind: str, *, kernel: str) -> Tensor:
    """Return the activation of what `project` returned, and of its sum with a bias.

    Shape:
        x: [..., F]; bias: [F]. Returns the shape of x.
    """
    if bias is None:
        return activate(x, kind, kernel=kernel)
    return chosen_kernel("activation", BIAS_GELU_KERNELS, kernel, x).run(x, bias, kind)


def plain_choices(linear: nn.Module, kind: str, kernel: str, like: Tensor) -> list[KernelChoice]:
    """Say what computes an activation without a gate, if it has several kernels."""
    if kind == "relu2":
        return [activation_choice(kernel, kind, like)]
    if kind not in _FUSED:
        return []
    chosen, bias = choice_of("activation", BIAS_GELU_KERNELS, kernel, like), _bias_of(linear, kind)
    if chosen.kernel == "fused" and isinstance(bias, str):
        return [KernelChoice("activation", "torch", bias)]
    return [chosen]


def _bias_of(linear: nn.Module, kind: str) -> Tensor | str:
    """The bias that a kernel may add, or why there is none."""
    if kind not in _FUSED:
        return f"activation {kind}: it is for {', '.join(_FUSED)}"
    if not isinstance(linear, ColumnParallelLinear):
        return "an adapter is added to the projection first"
    return "the projection has no bias" if linear.bias is None else linear.bias


def _fused(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    return _FUSED[kind](x, bias, kernel=mt_fusions.fused_kernel(x))


def _reference(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return activate(x.to(wide) + bias.to(wide), kind).to(x.dtype)


BIAS_GELU_KERNELS: tuple[Kernel[Tensor], ...] = (
    Kernel("fused", _fused, lambda x: fused_obstacle("bias_gelu", x), fused_drawback),
    Kernel("torch", lambda x, bias, kind: activate(x + bias, kind), serves),
    Kernel("reference", _reference, serves),
)
"""But for `fused`, a model has the projection add the bias, in the same pass."""
