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
from mt_parallel_state.levels import blocks, cut_into_levels
from mt_parallel_state.mesh import layout_of_mesh
from mt_parallel_state.options import GroupOptions
from mt_parallel_state.randomness import (
    fill_normal_,
    hash_key,
    initialize_,
    random_uniform,
    stream_key,
)
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
    "GroupOptions",
    "ParallelLayout",
    "ParallelState",
    "ParamSharding",
    "PartitionSpec",
    "blocks",
    "cut_into_levels",
    "detect_env",
    "fill_normal_",
    "global_shape_of",
    "hash_key",
    "init_process_group",
    "initialize_",
    "launch",
    "layout_of_mesh",
    "leave_process_group",
    "offsets_of",
    "random_uniform",
    "shard_param",
    "sharding_of",
    "stream_key",
]
