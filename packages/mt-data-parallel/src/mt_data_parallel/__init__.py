"""Bucketed gradient reduction that overlaps with backward, and parameters sharded the same way."""

from mt_data_parallel.bucket import BufferKey
from mt_data_parallel.buffer import DEFAULT_BUCKET_SIZE, GradBuffer
from mt_data_parallel.encoding import Encoding, Part
from mt_data_parallel.grad import grad_of
from mt_data_parallel.layout import (
    BucketRange,
    BufferLayout,
    ParamRange,
    plan_buckets,
    plan_whole,
)
from mt_data_parallel.partial import reduce_partial_grads
from mt_data_parallel.piece import Piece, pieces_of
from mt_data_parallel.reduction import Reduction
from mt_data_parallel.shard import shard

__all__ = [
    "DEFAULT_BUCKET_SIZE",
    "BucketRange",
    "BufferKey",
    "BufferLayout",
    "Encoding",
    "GradBuffer",
    "ParamRange",
    "Part",
    "Piece",
    "Reduction",
    "grad_of",
    "pieces_of",
    "plan_buckets",
    "plan_whole",
    "reduce_partial_grads",
    "shard",
]
