"""The residual stream between branches, whose last addition a norm may make."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import mt_fusions
import torch
from torch import Tensor, nn

from mt_model.block.dropout import DropoutSite
from mt_model.block.recomputation import is_recomputed
from mt_model.kernels.choice import Kernel, fused_drawback, fused_obstacle, serves


class Sum(NamedTuple):
    """A residual stream and the output of a branch that is still to be added to it.

    Shape:
        stream, branch: [B, S, hidden].
    """

    stream: Tensor
    branch: Tensor


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


def _fused(
    x: Tensor, y: Tensor, dropout: DropoutSite, index: Tensor | None, *, opens: bool
) -> Stream:
    if index is None or not dropout.probability:
        return Sum(x, y) if opens else x + y
    if torch.compiler.is_compiling():  # the kernel's key is a number, of one site alone
        return x + dropout(y, index)
    dtype = torch.promote_types(x.dtype, y.dtype)
    return mt_fusions.bias_dropout_add(
        y.to(dtype),
        None,
        x.to(dtype),
        dropout.probability,
        key=dropout.key,
        first=index[..., 0],  # those of a token are neighbours
        kernel=mt_fusions.fused_kernel(x),
    )


def _reference(
    x: Tensor, y: Tensor, dropout: DropoutSite, index: Tensor | None, *, opens: bool
) -> Stream:
    del opens
    return x + dropout(y, index)


RESIDUAL_KERNELS: tuple[Kernel[Stream], ...] = (
    Kernel("fused", _fused, lambda x: fused_obstacle("bias_dropout_add", x), fused_drawback),
    Kernel("reference", _reference, serves),
)
"""They add the output of a branch, with dropout; `opens` lets the norm behind do it."""
