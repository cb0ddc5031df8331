"""Attention over a sequence that is split over ranks."""

from mt_context_parallel.splits import Segment, pad_length, positions, segments, shard, unshard

__all__ = [
    "Segment",
    "pad_length",
    "positions",
    "segments",
    "shard",
    "unshard",
]
