"""fp32 masters as remainders of their bf16 parameters."""

from __future__ import annotations

import torch
from torch import Tensor

_TIE = 1 << 15  # the one distance that 16 bits don't hold
_BITS = 8


def split(master: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return an fp32 tensor as its nearest bf16 one and the distance to it.

    The distance, in units of the last place of fp32, is from -2^15 to 2^15. That is one value too
    many for 16 bits: +2^15 occurs if a number is halfway between two bf16 values and the even one
    is below. A flag distinguishes it from -2^15, so every number is restored exactly, and bf16 is
    rounded to nearest even as usual.

    Args:
        master: fp32.

    Returns:
        The bf16 tensor and the distance (int16), in its shape, and eight flags to a byte (uint8).
    """
    param = master.to(torch.bfloat16)
    distance = master.view(torch.int32) - (param.view(torch.int16).to(torch.int32) << 16)
    flags = torch.nn.functional.pad((distance == _TIE).flatten(), (0, -distance.numel() % _BITS))
    packed = (flags.view(-1, _BITS).to(torch.uint8) << _places(master)).sum(1, dtype=torch.uint8)
    return param, distance.to(torch.int16), packed


def join(param: Tensor, distance: Tensor, flags: Tensor) -> Tensor:
    """Return the fp32 tensor from the results of `split`."""
    bits = (param.view(torch.int16).to(torch.int32) << 16) + distance
    tied = ((flags.unsqueeze(1) >> _places(param)) & 1).flatten()[: param.numel()]
    bits += tied.view(param.shape).to(torch.int32) << 16
    return bits.view(torch.float32)


def _places(like: Tensor) -> Tensor:
    return torch.arange(_BITS, dtype=torch.uint8, device=like.device)
