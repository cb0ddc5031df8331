"""The residual stream between branches, whose last addition a norm may make."""

from __future__ import annotations

from typing import TypeAlias

import torch
from mt_fusions import Sum
from torch import Tensor, nn

from mt_model.block.recomputation import is_recomputed

Stream: TypeAlias = Tensor | Sum


def added(x: Stream) -> Tensor:
    """Return the stream with its last branch."""
    return x if isinstance(x, Tensor) else x.stream + x.branch


def normed(norm: nn.Module | None, x: Stream) -> tuple[Tensor, Tensor]:
    """Return the norm of a stream, or the stream where there is none, and the stream.

    What is still to be added the norm adds itself, in one kernel.
    """
    if isinstance(x, Tensor) or norm is None:
        x = added(x)
        return x if norm is None else norm(x), x
    dtype = torch.promote_types(x.stream.dtype, x.branch.dtype)  # they differ under autocast
    return norm(x.branch.to(dtype), x.stream.to(dtype))


def apart(norm: nn.Module | None, *, frees_norm: bool) -> str | None:
    """Say why an addition is no part of the norm behind it; None where it may be.

    Args:
        norm: Reads the sum next, and nothing else does.
        frees_norm: Backward makes its output again.
    """
    if norm is None:
        return "no norm is next"
    if frees_norm or is_recomputed(norm):
        return "backward makes the norm again, alone"
    return None
