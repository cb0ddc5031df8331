"""Attention over a sequence that is split over ranks."""

from __future__ import annotations

from mt_context_parallel.attention import (
    Algorithm,
    HierarchicalGroups,
    context_parallel_attention,
    default_kernels,
)
from mt_context_parallel.flex import FlexKernel
from mt_context_parallel.kernels import (
    CudnnKernel,
    FlashKernel,
    Kernel,
    ReferenceKernel,
    SdpaCpuKernel,
)
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
    "CudnnKernel",
    "FlashKernel",
    "FlexKernel",
    "HierarchicalGroups",
    "Kernel",
    "ReferenceKernel",
    "SdpaCpuKernel",
    "Segment",
    "Split",
    "Tile",
    "context_parallel_attention",
    "default_kernels",
    "merge",
    "pad_length",
    "positions",
    "segments",
    "shard",
    "unshard",
]
