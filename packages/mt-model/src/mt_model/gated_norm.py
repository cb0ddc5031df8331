"""RMSNorm of groups of channels, with a gate beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from mt_parallel_state import Group, copy_to_group, group_rank, group_size, reduce_from_group
from torch import Tensor, nn

from mt_model.initialization import start_from


@dataclass(frozen=True, kw_only=True)
class SharedGroups:
    """Groups of channels that are fewer than the ranks, which have each a part of one.

    Attributes:
        count: of the groups.
        ranks: process group of all who have a part of any.
    """

    count: int
    ranks: Group

    def mean(self, x: Tensor) -> Tensor:
        """Take the mean over the ranks of this rank's group: one all-reduce, forward and backward.

        Shape:
            x: [..., 1]. Returns the same.
        """
        sharing = group_size(self.ranks) // self.count
        own = group_rank(self.ranks) // sharing
        each = F.pad(x, (own, self.count - 1 - own))
        total = copy_to_group(reduce_from_group(each, self.ranks), self.ranks)
        return total[..., own : own + 1] / sharing


class GatedRMSNorm(nn.Module):
    """`n(x silu(gate)) weight`, or `n(x) weight silu(gate)`; n makes a group's mean square 1.

    Computed in fp32 (fp64 for fp64) and rounded once, to the gate's dtype.

    Args:
        channels: of the weight on this rank: of all its groups, or of one where they share it.
        eps: added to the mean square.
        gate_first: the gate is part of what is normalised.
        dtype: of the weight.
        shared: where ranks have parts of groups.

    Shape:
        forward(x, gate): [..., groups, size] -> the same.
    """

    def __init__(
        self,
        channels: int,
        *,
        eps: float,
        gate_first: bool,
        dtype: torch.dtype,
        shared: SharedGroups | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.gate_first, self.shared = eps, gate_first, shared
        self.weight = nn.Parameter(torch.empty(channels, dtype=dtype, device="meta"))
        start_from(self.weight, "ones")

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise each group of channels."""
        wide = torch.promote_types(gate.dtype, torch.float32)
        x, opened = x.to(wide), F.silu(gate.to(wide))
        if self.gate_first:
            x = x * opened
        mean = x.square().mean(-1, keepdim=True)
        if self.shared is not None:
            mean = self.shared.mean(mean)
        x = x * torch.rsqrt(mean + self.eps) * self.weight.to(wide).view(-1, x.shape[-1])
        return (x if self.gate_first else x * opened).to(gate.dtype)
