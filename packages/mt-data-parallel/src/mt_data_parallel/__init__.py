"""Bucketed gradient reduction that overlaps with backward."""

from mt_data_parallel.buffer import DEFAULT_BUCKET_SIZE, GradBuffer
from mt_data_parallel.grad import grad_of
from mt_data_parallel.layout import BucketRange, BufferLayout, ParamRange, plan_buckets
from mt_data_parallel.partial import reduce_partial_grads

__all__ = [
    "DEFAULT_BUCKET_SIZE",
    "BucketRange",
    "BufferLayout",
    "GradBuffer",
    "ParamRange",
    "grad_of",
    "plan_buckets",
    "reduce_partial_grads",
]
