"""Activations whose bits for a number depend on nothing but the number.

torch computes the last few numbers of a CPU thread's share by scalar code, which for sigmoid, SiLU,
GELU and softplus rounds otherwise than its vector code. So the same row has other bits in a tensor
of another size. exp, tanh and erf have one code for both, and single additions and products have no
choice.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mt_fusions.activations.activation import activate
from mt_fusions.blocks import wide_dtype

_QUICK = 1.702
_TANH = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_LEAST = -80.0  # whose exponential is still finite in fp32
_LINEAR = 20.0  # from which on softplus is its argument, as in torch


def invariant_sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid, computed in fp32 (fp64 for fp64) and rounded once."""
    wide = x.to(wide_dtype(x.dtype))
    return (1 + torch.exp(-wide.clamp(min=_LEAST))).reciprocal().to(x.dtype)


def invariant_softplus(x: Tensor) -> Tensor:
    """Return `log(1 + exp(x))`, computed in fp32 (fp64 for fp64) and rounded once."""
    wide = x.to(wide_dtype(x.dtype))
    small = torch.log1p(torch.exp(wide.clamp(max=_LINEAR)))
    return torch.where(wide > _LINEAR, wide, small).to(x.dtype)


def invariant_activation(x: Tensor, kind: str) -> Tensor:
    """Return `activate(x, kind)`, computed in fp32 (fp64 for fp64) and rounded once."""
    wide = x.to(wide_dtype(x.dtype))
    match kind:
        case "silu":
            found = wide * invariant_sigmoid(wide)
        case "gelu_quick":
            found = wide * invariant_sigmoid(_QUICK * wide)
        case "gelu":
            found = 0.5 * wide * (1 + torch.erf(wide * math.sqrt(0.5)))
        case "gelu_tanh":
            turned = torch.tanh(_TANH * (wide + _CUBIC * (wide * wide * wide)))
            found = 0.5 * wide * (1 + turned)
        case _:
            found = activate(wide, kind)
    return found.to(x.dtype)


def invariant_gated(
    gate: Tensor, up: Tensor, kind: str, *, clamp: float | None = None, up_offset: float = 0.0
) -> Tensor:
    """Return `invariant_activation(gate) * (up + up_offset)`.

    Args:
        gate: Input of the activation.
        up: What it multiplies.
        kind: Name of the activation.
        clamp: Largest value of the gate, and largest magnitude of `up`, before; None for none.
        up_offset: Added to `up` behind that.

    Shape:
        gate, up: [..., n]. Returns the same.
    """
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return invariant_activation(gate, kind) * (up + up_offset if up_offset else up)
