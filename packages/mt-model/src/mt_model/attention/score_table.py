"""Learned tables of attention score biases."""

from __future__ import annotations

import torch
from mt_parallel_state import PartitionSpec, shard_param
from torch import Tensor, nn

from mt_model.block.shard_context import ShardContext


class ScoreTable(nn.Module):
    """A learned number for each bucket of distances and each head.

    Parameters: `weight` [buckets, num_heads], split over "tp" in its second dim.

    Args:
        buckets: Number of rows.
        num_heads: Number of heads of the whole model.
        shard: This rank's share of the model.

    Shape:
        forward(): returns [buckets, heads of this rank].
    """

    def __init__(self, buckets: int, num_heads: int, *, shard: ShardContext) -> None:
        super().__init__()
        own = num_heads // shard.tp
        empty = torch.empty(buckets, own, dtype=shard.dtype, device="meta")
        spec = PartitionSpec() if shard.group is None else PartitionSpec(None, "tp")
        self.weight = shard_param(nn.Parameter(empty), spec)

    def forward(self) -> Tensor:
        """Return a copy, since sharded data parallelism may free the weight after forward."""
        return self.weight.clone()
