"""Quantised activations: scales, codes and rounding."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mt_parallel_state import Group, group_size
from torch import Tensor

from mt_quant.error import CalibrationError
from mt_quant.formats.format import InputFormat


def input_scale_of(
    x: Tensor, format: InputFormat, *, step: Tensor | None = None, group: Group = None
) -> Tensor:
    """Return the scale of an activation: the calibrated one, or one from its largest magnitude.

    Args:
        x: The activation.
        format: Number format, with scales for tokens or for the tensor.
        step: The static scale, [1, 1]; needed if the format is not dynamic.
        group: Ranks that split the last dim; an all-reduce (MAX) of the magnitudes.

    Shape:
        x: [tokens, n]. Returns fp32 [tokens, 1], or [1, 1] for a single scale.

    Raises:
        CalibrationError: The static scale is missing.
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
    return step_of(amax, format)


def step_of(amax: Tensor, format: InputFormat) -> Tensor:
    """Return the scale at which a magnitude gets the largest code; 1 for a magnitude of 0."""
    step = amax.float() / format.limit
    return torch.where(step > 0, step, 1.0)


def input_codes(x: Tensor, scale: Tensor, format: InputFormat) -> Tensor:
    """Return the nearest int8 codes, saturated.

    Shape:
        x: [tokens, n]. scale: [tokens, 1] or [1, 1]. Returns [tokens, n].
    """
    codes = (x.float() / scale).round().clamp(-format.limit, format.limit)
    return codes.to(torch.int8)


def round_activation(
    x: Tensor, format: InputFormat, *, step: Tensor | None = None, group: Group = None
) -> Tensor:
    """Return an activation rounded to a format, in its own dtype.

    Args:
        x: The activation.
        format: Number format.
        step: The static scale; see `input_scale_of`.
        group: Ranks that split the last dim; see `input_scale_of`. Blocks lie within a rank, so of
            their scales only the level of nvfp4 is reduced.

    Shape:
        x: [tokens, n]. Returns the same.
    """
    x = x.detach()
    if format.type == "int8":
        scale = input_scale_of(x, format, step=step, group=group)
        return (input_codes(x, scale, format).float() * scale).to(x.dtype)
    from mt_fp8 import quantize  # only floats need it

    if format.group == "block":
        return quantize(x, format.scaling, group=group).dequantize()
    scale = input_scale_of(x, format, step=step, group=group)
    factor = 1 / scale.view(scale.shape if format.group == "token" else ())
    return quantize(x, format.scaling, factor=factor).dequantize()
