"""The activation between an expert's two projections."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mt_fusions
import torch
import torch.nn.functional as F
from torch import Tensor

from mt_moe.experts.form import Activation
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
    form = {"approximate": "tanh"} if options.activation == "gelu_tanh" else {}
    terms = {"clamp": options.clamp, "up_offset": options.up_offset}
    return GATES[options.activation](gate, up, **form, **terms)


def activate(x: Tensor, kind: Activation) -> Tensor:
    """Apply an activation without a gate.

    Shape:
        x: any. Returns the same shape.
    """
    match kind:
        case "silu":
            return F.silu(x)
        case "gelu" | "gelu_tanh":
            return F.gelu(x, approximate="none" if kind == "gelu" else "tanh")
        case "gelu_quick":
            return x * torch.sigmoid(1.702 * x)
        case "relu":
            return F.relu(x)
        case _:
            return mt_fusions.squared_relu(x)
