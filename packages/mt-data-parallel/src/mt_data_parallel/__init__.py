"""Bucketed gradient reduction that overlaps with backward, and parameters sharded the same way."""

from mt_data_parallel.buffer import GradBuffer
from mt_data_parallel.grad import grad_of
from mt_data_parallel.graph_sinks import GraphSinks
from mt_data_parallel.layout import plan_buckets
from mt_data_parallel.param_shard import ParamShard, param_shards
from mt_data_parallel.partial import reduce_partial_grads
from mt_data_parallel.reduction import Reduction
from mt_data_parallel.shard import shard

__all__ = [
    "GradBuffer",
    "GraphSinks",
    "ParamShard",
    "Reduction",
    "grad_of",
    "param_shards",
    "plan_buckets",
    "reduce_partial_grads",
    "shard",
]
