"""Sinkhorn normalisation of a router's logits, over all tokens of a group of ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from mt_parallel_state import Group, group_size
from torch import Tensor


@torch.no_grad()
def sinkhorn_bias(logits: Tensor, iterations: int, *, group: Group = None) -> Tensor:
    """Return what balances the experts when it is added to the logits (Clark et al., 2022).

    Sinkhorn's iteration scales the rows and columns of `exp(logits)` until each token has the same
    share and each expert too. A choice among a token's experts sees the columns' scale alone, whose
    logarithm this is. The number of iterations is fixed, so no host waits; each sums E numbers over
    the group. Computed in fp64, in logarithms, which do not overflow.

    Args:
        logits: Of this rank's tokens.
        iterations: How many.
        group: The ranks that have the other tokens; None is none.

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


def sinkhorn(logits: Tensor, iterations: int, *, group: Group = None) -> Tensor:
    """Return the balanced shares: rows sum to 1 / T, columns to nearly 1 / E.

    Shape:
        logits: [T, E]. Returns the same, fp64; T in the sums is that of the group.
    """
    shares = (logits.double() + sinkhorn_bias(logits, iterations, group=group)).softmax(1)
    return shares / (logits.shape[0] * group_size(group))


def _sum_over(logarithms: Tensor, group: Group) -> Tensor:
    """The logarithm of the sum over ranks, without overflow."""
    if group is None:
        return logarithms
    top = logarithms.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    top = top.clamp(min=-math.sqrt(torch.finfo(top.dtype).max))  # of no tokens at all
    total = (logarithms - top).exp()
    dist.all_reduce(total, group=group)
    return total.log() + top
