"""The activation between an expert's two projections."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mt_fusions
from torch import Tensor

from mt_moe.experts.options import ExpertOptions

GATES: Mapping[str, Callable[..., Tensor]] = {
    "silu": mt_fusions.swiglu,
    "gelu": mt_fusions.geglu,
    "gelu_tanh": mt_fusions.geglu,
    "gelu_quick": mt_fusions.quick_geglu,
}


def gated(gate: Tensor, up: Tensor, options: ExpertOptions) -> Tensor:
    """Return `act(gate) * (up + offset)`, with gate and up clamped first if there is a clamp.

    Shape:
        gate, up: [..., n]. Returns the same shape.
    """
    if options.invariant:
        terms = {"clamp": options.clamp, "up_offset": options.up_offset}
        return mt_fusions.invariant_gated(gate, up, options.activation, **terms)
    form = {"approximate": "tanh"} if options.activation == "gelu_tanh" else {}
    terms = {"clamp": options.clamp, "up_offset": options.up_offset}
    return GATES[options.activation](gate, up, **form, **terms)


def activate(x: Tensor, options: ExpertOptions) -> Tensor:
    """Apply the activation without a gate.

    Shape:
        x: any. Returns the same shape.
    """
    kind = options.activation
    if options.invariant:
        return mt_fusions.invariant_activation(x, kind)
    return mt_fusions.squared_relu(x) if kind == "relu2" else mt_fusions.activate(x, kind)
