"""Ulysses: swap a split sequence for split heads by an all-to-all, and back.

Jacobs et al. 2023, "DeepSpeed Ulysses".
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["heads_to_tokens", "tokens_to_heads"]


def _all_to_all(x: Tensor, group: dist.ProcessGroup, *, cut: int, join: int) -> Tensor:
    """Send piece j of dim `cut` to rank j, and join what arrives along dim `join`."""
    pieces = x.unflatten(cut, (group.size(), -1)).movedim(cut, 0).contiguous()
    out = torch.empty_like(pieces)
    dist.all_to_all_single(out, pieces, group=group)
    return out.movedim(0, join).flatten(join, join + 1)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
        ctx.group, ctx.cut, ctx.join = group, cut, join
        return _all_to_all(x, group, cut=cut, join=join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = _Exchange.apply(grads[0], ctx.group, ctx.join, ctx.cut)
        return back, None, None, None


def tokens_to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """From all heads of some tokens to some heads of all tokens. Collective.

    Shape:
        x: [B, S, H, D]. Returns [B, ranks * S, H / ranks, D], the ranks' tokens one after another.
    """
    return cast(Tensor, _Exchange.apply(x, group, 2, 1))


def heads_to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of `tokens_to_heads`. Collective.

    Shape:
        x: [B, ranks * S, H / ranks, D]. Returns [B, S, H, D].
    """
    return cast(Tensor, _Exchange.apply(x, group, 1, 2))
