"""Modules that every rank has whole."""

from __future__ import annotations

from typing import cast

from torch import nn

from mt_model.block.initial import start_from
from mt_model.block.shard_context import ShardContext


def replicated_table(rows: int, size: int, shard: ShardContext) -> nn.Embedding:
    """Make a table that every rank has whole, on the meta device.

    Args:
        rows: Number of entries.
        size: Width of each entry.
        shard: This rank's share of the model.
    """
    table = nn.Embedding(rows, size, dtype=shard.dtype, device="meta")
    start_from(cast("nn.Parameter", table.weight), "embedding")
    shard.mark_replicated(table, partial=shard.sequence_parallel)
    return table
