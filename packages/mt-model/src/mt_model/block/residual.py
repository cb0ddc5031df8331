"""The residual stream between branches; a norm may make its last addition."""

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

    The norm makes a pending addition in the same kernel.
    """
    if isinstance(x, Tensor) or norm is None:
        x = added(x)
        return x if norm is None else norm(x), x
    dtype = torch.promote_types(x.stream.dtype, x.branch.dtype)  # they differ under autocast
    return norm(x.branch.to(dtype), x.stream.to(dtype))


def apart(norm: nn.Module | None, *, frees_norm: bool) -> str | None:
    """Return why an addition is not fused with the following norm; None where it may be.

    Args:
        norm: The norm that alone reads the sum next.
        frees_norm: Whether backward recomputes the norm's output.
    """
    if norm is None:
        return "no norm is next"
    if frees_norm or is_recomputed(norm):
        return "backward makes the norm again, alone"
    return None
