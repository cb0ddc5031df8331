"""Attention over a sequence that is split over ranks."""

from mt_context_parallel.attention import (
    Algorithm,
    HierarchicalGroups,
    context_parallel_attention,
    default_kernels,
)
from mt_context_parallel.dynamic import (
    DynamicItem,
    DynamicPlan,
    block_groups,
    plan_dynamic,
    ranks_for,
)
from mt_context_parallel.kernels import FlashKernel, Kernel, ReferenceKernel, SdpaCpuKernel
from mt_context_parallel.local import merge
from mt_context_parallel.splits import (
    Segment,
    Split,
    pad_length,
    positions,
    segments,
    shard,
    unshard,
)
from mt_context_parallel.tiles import AttentionDropout, AttentionMask, Tile

__all__ = [
    "Algorithm",
    "AttentionDropout",
    "AttentionMask",
    "DynamicItem",
    "DynamicPlan",
    "FlashKernel",
    "HierarchicalGroups",
    "Kernel",
    "ReferenceKernel",
    "SdpaCpuKernel",
    "Segment",
    "Split",
    "Tile",
    "block_groups",
    "context_parallel_attention",
    "default_kernels",
    "merge",
    "pad_length",
    "plan_dynamic",
    "positions",
    "ranks_for",
    "segments",
    "shard",
    "unshard",
]
