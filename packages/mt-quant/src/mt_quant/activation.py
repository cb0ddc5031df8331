"""Activations in low precision: their scales, and what rounding makes of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mt_parallel_state import Group, group_size
from torch import Tensor

from mt_quant.error import CalibrationError
from mt_quant.format import InputFormat


def input_scale_of(
    x: Tensor, format: InputFormat, *, step: Tensor | None = None, group: Group = None
) -> Tensor:
    """Return the scale of an activation: the calibrated one, or that of its largest magnitude.

    Args:
        x: The activation.
        format: Of its codes.
        step: The static scale, [1, 1]; needed where the format is not dynamic.
        group: Ranks that split the last dim; their magnitudes are reduced, MAX.

    Shape:
        x: [tokens, n]. Returns fp32 [tokens, 1], or [1, 1] for a scale of the tensor.
    """
    if not format.dynamic:
        if step is None:
            raise CalibrationError(f"{format} has a scale from calibration, and there is none")
        return step
    amax = x.detach().abs().amax(-1, keepdim=True).float()
    if format.group == "tensor":
        amax = amax.amax(0, keepdim=True)
    if group is not None and group_size(group) > 1:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    scale = amax / format.limit
    return torch.where(scale > 0, scale, 1.0)


def input_codes(x: Tensor, scale: Tensor, format: InputFormat) -> Tensor:
    """Return int8 codes, nearest and saturated.

    Shape:
        x: [tokens, n]. scale: [tokens, 1] or [1, 1]. Returns [tokens, n].
    """
    codes = (x.float() / scale).round().clamp(-format.limit, format.limit)
    return codes.to(torch.int8)


def round_input(x: Tensor, scale: Tensor, format: InputFormat) -> Tensor:
    """Return what an activation is after rounding, in its dtype.

    Shape:
        As of `input_codes`.
    """
    return (input_codes(x, scale, format).float() * scale).to(x.dtype)
