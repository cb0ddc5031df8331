"""RMSNorm of groups of channels, with a gate beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mt_fusions
import torch
import torch.nn.functional as F
from mt_kernels import Choice, Selector
from mt_parallel_state import Group, copy_to_group, group_rank, group_size, reduce_from_group
from torch import Tensor, nn

from mt_model.block.initial import start_from
from mt_model.kernels.config import Kernels


@dataclass(frozen=True, kw_only=True)
class SharedGroups:
    """Groups of channels split over several ranks each.

    Attributes:
        count: Number of groups.
        ranks: Process group of all ranks with a part of a group.
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
        gate_first: Multiply by the gate before the norm.
        dtype: of the weight.
        shared: where ranks have parts of groups.
        kernels: what computes norm and gate.

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
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.gate_first, self.shared = eps, gate_first, shared
        kernels = Kernels() if kernels is None else kernels
        self.norm = Selector(mt_fusions.RMS_NORM, kernels.norm)
        self.product = Selector(mt_fusions.SILU_PRODUCT, kernels.activations)
        self.weight = nn.Parameter(torch.empty(channels, dtype=dtype, device="meta"))
        start_from(self.weight, "ones")

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise each group of channels."""
        wide = torch.promote_types(gate.dtype, torch.float32)
        x, opened = x.to(wide), gate.to(wide)
        if self.gate_first:
            x = self._opened(x, opened)
        x = self._normed(x)
        return (x if self.gate_first else self._opened(x, opened)).to(gate.dtype)

    def kernel_choices(self, like: Tensor) -> Iterator[Choice[Any]]:
        """Yield what computes norm and gate."""
        wide = like.to(torch.promote_types(like.dtype, torch.float32))
        yield self.product.choose(wide, wide)
        if self.shared is not None:
            reason = "ranks that share a group of channels sum its mean square between"
            yield Choice("rms_norm", mt_fusions.RMS_NORM.get("reference"), reason)
        else:
            x, weight = wide.new_empty(0, 1), self.weight if self.weight.dim() == 1 else None
            yield self.norm.choose(x, weight)

    def _opened(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.product.find(gate, x).function(gate, x)

    def _normed(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype).view(-1, x.shape[-1])
        if self.shared is not None:
            mean = self.shared.mean(x.square().mean(-1, keepdim=True))
            return x * torch.rsqrt(mean + self.eps) * weight
        if len(weight) == 1:
            return self.norm.find(x, weight[0]).function(x, weight[0], self.eps)
        return self.norm.find(x, None).function(x, None, self.eps) * weight
