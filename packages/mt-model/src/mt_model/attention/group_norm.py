"""RMSNorm of vectors split over a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mt_parallel_state import Group, copy_to_group, group_size, reduce_from_group
from torch import Tensor


def norm_over_group(
    parts: Sequence[Tensor], weights: Sequence[Tensor], *, group: Group, eps: float
) -> list[Tensor]:
    """Norm tensors over all dims after the tokens and over the ranks of a group.

    Each is `x / sqrt(mean(x^2) + eps) * w`, in fp32 (fp64 for fp64) and rounded once. One
    all-reduce of the sums of squares of all parts, forward and backward.

    Args:
        parts: This rank's share of each vector; shares have the same size on all ranks.
        weights: Weights of that share.
        group: Ranks that hold the shares; None for whole vectors.
        eps: Number added to the mean square.

    Shape:
        parts: [B, S, ...]; weights: broadcast to the dims behind. Returns the shapes of parts.
    """
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in parts]
    own = torch.stack([x.flatten(2).square().sum(-1) for x in wide], dim=-1)
    # The sum is used by the work of each rank, so its gradients are summed over them.
    total = copy_to_group(reduce_from_group(own, group), group)
    ranks, normed = group_size(group), []
    for index, (x, weight, given) in enumerate(zip(wide, weights, parts, strict=True)):
        mean = total[..., index] / (x[0, 0].numel() * ranks)
        rstd = torch.rsqrt(mean + eps).reshape(*mean.shape, *(1,) * (x.dim() - 2))
        normed.append((x * rstd * weight.to(x.dtype)).to(given.dtype))
    return normed
