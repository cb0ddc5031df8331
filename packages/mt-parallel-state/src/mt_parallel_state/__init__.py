"""Rank layouts, named process groups and parameter sharding records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_parallel_state.check import CheckMode, CollectiveError
from mt_parallel_state.collectives import (
    Group,
    Pending,
    all_gather,
    all_to_all,
    apply_outside_graph,
    copy_to_group,
    gather_from_group,
    group_rank,
    group_size,
    outside_graph,
    reduce_from_group,
    reduce_scatter,
    scatter_to_group,
    shard_size,
    start_all_gather,
    start_all_reduce,
    start_all_to_all_rows,
    start_reduce_scatter,
)
from mt_parallel_state.gradients import GradSink, WgradStore
from mt_parallel_state.groups import twin_group
from mt_parallel_state.layout import ParallelLayout
from mt_parallel_state.levels import cut_into_levels
from mt_parallel_state.matrix import MatrixSpec
from mt_parallel_state.options import GroupOptions
from mt_parallel_state.owner import is_owner
from mt_parallel_state.randomness import (
    fill_normal_,
    hash_key,
    initialize_,
    random_uniform,
)
from mt_parallel_state.sharding import (
    ParamSharding,
    global_shape_of,
    mark_matrix,
    offsets_of,
    shard_param,
    sharding_of,
    shardings,
)
from mt_parallel_state.share import agreement_device, share_json
from mt_parallel_state.spec import PartitionSpec
from mt_parallel_state.state import ParallelState

if TYPE_CHECKING:
    from mt_parallel_state.environment import DistributedEnv, detect_env
    from mt_parallel_state.hang import report_hangs
    from mt_parallel_state.job import (
        PeerLostError,
        init_process_group,
        is_out_of_memory,
        joined,
        leave_process_group,
        must_launch,
    )
    from mt_parallel_state.launcher import launch
    from mt_parallel_state.signals import StopSignals, stop_signals
    from mt_parallel_state.store import JoinError

__all__ = [
    "CheckMode",
    "CollectiveError",
    "DistributedEnv",
    "GradSink",
    "Group",
    "GroupOptions",
    "JoinError",
    "MatrixSpec",
    "ParallelLayout",
    "ParallelState",
    "ParamSharding",
    "PartitionSpec",
    "PeerLostError",
    "Pending",
    "StopSignals",
    "WgradStore",
    "agreement_device",
    "all_gather",
    "all_to_all",
    "apply_outside_graph",
    "copy_to_group",
    "cut_into_levels",
    "detect_env",
    "fill_normal_",
    "gather_from_group",
    "global_shape_of",
    "group_rank",
    "group_size",
    "hash_key",
    "init_process_group",
    "initialize_",
    "is_out_of_memory",
    "is_owner",
    "joined",
    "launch",
    "leave_process_group",
    "mark_matrix",
    "must_launch",
    "offsets_of",
    "outside_graph",
    "random_uniform",
    "reduce_from_group",
    "reduce_scatter",
    "report_hangs",
    "scatter_to_group",
    "shard_param",
    "shard_size",
    "sharding_of",
    "shardings",
    "share_json",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all_rows",
    "start_reduce_scatter",
    "stop_signals",
    "twin_group",
]

# What apps call once is resolved at first use, to keep the import of a model short.
__getattr__ = resolve_later(__name__)
