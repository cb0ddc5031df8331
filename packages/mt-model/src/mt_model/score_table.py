"""Learned tables of what is added to the scores of attention."""

from __future__ import annotations

import torch
from mt_parallel_state import PartitionSpec, shard_param
from torch import Tensor, nn

from mt_model.placement import Placement


class ScoreTable(nn.Module):
    """A learned number for each bucket of distances and each head.

    Parameters: `weight` [buckets, num_heads], split over "tp" in its second dim.

    Args:
        buckets: Rows.
        num_heads: Of the whole model.
        placement: Of this rank.

    Shape:
        forward(): returns [buckets, heads of this rank].
    """

    def __init__(self, buckets: int, num_heads: int, *, placement: Placement) -> None:
        super().__init__()
        own = num_heads // placement.tp
        empty = torch.empty(buckets, own, dtype=placement.dtype, device="meta")
        spec = PartitionSpec() if placement.group is None else PartitionSpec(None, "tp")
        self.weight = shard_param(nn.Parameter(empty), spec)

    def forward(self) -> Tensor:
        """Return a copy: what shards parameters may let this one go after its module's forward."""
        return self.weight.clone()
