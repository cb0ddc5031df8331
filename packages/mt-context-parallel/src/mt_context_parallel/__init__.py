"""Context-parallel attention: exact attention over a sequence that ranks share."""

from __future__ import annotations

from mt_context_parallel.attention import Algorithm, HierarchicalGroups, context_parallel_attention
from mt_context_parallel.kernels import ReferenceKernel, TileKernel
from mt_context_parallel.local import merge
from mt_context_parallel.splits import Split, pad_length, positions, segments, shard, unshard
from mt_context_parallel.tiles import AttentionDropout, AttentionMask, Tile

__all__ = [
    "Algorithm",
    "AttentionDropout",
    "AttentionMask",
    "HierarchicalGroups",
    "ReferenceKernel",
    "Split",
    "Tile",
    "TileKernel",
    "context_parallel_attention",
    "merge",
    "pad_length",
    "positions",
    "segments",
    "shard",
    "unshard",
]
