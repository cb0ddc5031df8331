"""Attention over a sequence that is split over ranks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from mt_context_parallel.dynamic import (
        DynamicItem,
        DynamicPlan,
        block_groups,
        plan_dynamic,
        ranks_for,
    )

__all__ = [
    "Algorithm",
    "AttentionDropout",
    "AttentionMask",
    "CudnnKernel",
    "DynamicItem",
    "DynamicPlan",
    "FlashKernel",
    "FlexKernel",
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

# What a data loader calls is resolved at first use, to keep the import of a model short.
_HOMES = dict.fromkeys(
    ("DynamicItem", "DynamicPlan", "block_groups", "plan_dynamic", "ranks_for"), "dynamic"
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
