"""Rank layouts, named process groups and parameter sharding records."""

from mt_parallel_state.check import CheckMode, CollectiveError
from mt_parallel_state.environment import (
    DistributedEnv,
    detect_env,
    init_process_group,
    leave_process_group,
)
from mt_parallel_state.launch import launch
from mt_parallel_state.layout import ParallelLayout
from mt_parallel_state.randomness import fill_normal_, hash_key, initialize_, random_uniform
from mt_parallel_state.sharding import (
    ParamSharding,
    global_shape_of,
    offsets_of,
    shard_param,
    sharding_of,
)
from mt_parallel_state.spec import PartitionSpec
from mt_parallel_state.state import ParallelState

__all__ = [
    "CheckMode",
    "CollectiveError",
    "DistributedEnv",
    "ParallelLayout",
    "ParallelState",
    "ParamSharding",
    "PartitionSpec",
    "detect_env",
    "fill_normal_",
    "global_shape_of",
    "hash_key",
    "init_process_group",
    "initialize_",
    "launch",
    "leave_process_group",
    "offsets_of",
    "random_uniform",
    "shard_param",
    "sharding_of",
]
