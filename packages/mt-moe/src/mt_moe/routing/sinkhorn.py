"""Sinkhorn normalisation of a router's logits, over all tokens of a group of ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from mt_parallel_state import Group
from torch import Tensor


@torch.no_grad()
def sinkhorn_bias(logits: Tensor, iterations: int, *, group: Group = None) -> Tensor:
    """Return a bias of the logits that balances the experts (Clark et al., 2022).

    Sinkhorn's iteration scales rows and columns of `exp(logits)` until rows have equal sums, and
    columns too. Only the scale of the columns affects a token's choice; the bias is its logarithm.
    The number of iterations is fixed, so the host does not wait; each sums E numbers over the
    group. Computed in fp64 and in logarithms, which do not overflow.

    Args:
        logits: Logits of this rank's tokens.
        iterations: Number of iterations.
        group: The ranks with the other tokens; None is this rank alone.

    Shape:
        logits: [T, E]. Returns [E].
    """
    logits = logits.double()
    bias = logits.new_zeros(logits.shape[1])
    for _ in range(iterations):
        rows = -torch.logsumexp(logits + bias, 1, keepdim=True)
        bias = -_sum_over(torch.logsumexp(logits + rows, 0), group)
        bias = bias - bias.mean()
    return bias


def _sum_over(logarithms: Tensor, group: Group) -> Tensor:
    """Return the logarithm of the sum over ranks, without overflow."""
    if group is None:
        return logarithms
    top = logarithms.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    top = top.clamp(min=-math.sqrt(torch.finfo(top.dtype).max))  # without any token
    total = (logarithms - top).exp()
    dist.all_reduce(total, group=group)
    return total.log() + top
