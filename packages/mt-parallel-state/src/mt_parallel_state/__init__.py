"""Rank layouts, named process groups and parameter sharding records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_parallel_state.check import CheckMode as CheckMode
from mt_parallel_state.check import CollectiveError as CollectiveError
from mt_parallel_state.collectives import Group as Group
from mt_parallel_state.collectives import Pending as Pending
from mt_parallel_state.collectives import all_gather as all_gather
from mt_parallel_state.collectives import all_to_all as all_to_all
from mt_parallel_state.collectives import apply_outside_graph as apply_outside_graph
from mt_parallel_state.collectives import copy_to_group as copy_to_group
from mt_parallel_state.collectives import gather_from_group as gather_from_group
from mt_parallel_state.collectives import gather_rows as gather_rows
from mt_parallel_state.collectives import group_rank as group_rank
from mt_parallel_state.collectives import group_size as group_size
from mt_parallel_state.collectives import outside_graph as outside_graph
from mt_parallel_state.collectives import reduce_from_group as reduce_from_group
from mt_parallel_state.collectives import reduce_scatter as reduce_scatter
from mt_parallel_state.collectives import scatter_to_group as scatter_to_group
from mt_parallel_state.collectives import shard_size as shard_size
from mt_parallel_state.collectives import start_all_gather as start_all_gather
from mt_parallel_state.collectives import start_all_reduce as start_all_reduce
from mt_parallel_state.collectives import start_all_to_all_rows as start_all_to_all_rows
from mt_parallel_state.collectives import start_reduce_scatter as start_reduce_scatter
from mt_parallel_state.gradients import GradSink as GradSink
from mt_parallel_state.gradients import WgradStore as WgradStore
from mt_parallel_state.groups import twin_group as twin_group
from mt_parallel_state.layout import ParallelLayout as ParallelLayout
from mt_parallel_state.levels import cut_into_levels as cut_into_levels
from mt_parallel_state.matrix import MatrixSpec as MatrixSpec
from mt_parallel_state.options import GroupOptions as GroupOptions
from mt_parallel_state.owner import is_owner as is_owner
from mt_parallel_state.randomness import fill_normal_ as fill_normal_
from mt_parallel_state.randomness import hash_key as hash_key
from mt_parallel_state.randomness import initialize_ as initialize_
from mt_parallel_state.randomness import random_uniform as random_uniform
from mt_parallel_state.sharding import ParamSharding as ParamSharding
from mt_parallel_state.sharding import global_shape_of as global_shape_of
from mt_parallel_state.sharding import mark_matrix as mark_matrix
from mt_parallel_state.sharding import offsets_of as offsets_of
from mt_parallel_state.sharding import shard_param as shard_param
from mt_parallel_state.sharding import sharding_of as sharding_of
from mt_parallel_state.sharding import shardings as shardings
from mt_parallel_state.share import agreement_device as agreement_device
from mt_parallel_state.share import share_json as share_json
from mt_parallel_state.spec import PartitionSpec as PartitionSpec
from mt_parallel_state.state import ParallelState as ParallelState

if TYPE_CHECKING:
    from mt_parallel_state.environment import DistributedEnv as DistributedEnv
    from mt_parallel_state.environment import detect_env as detect_env
    from mt_parallel_state.hang import report_hangs as report_hangs
    from mt_parallel_state.job import PeerLostError as PeerLostError
    from mt_parallel_state.job import init_process_group as init_process_group
    from mt_parallel_state.job import is_out_of_memory as is_out_of_memory
    from mt_parallel_state.job import joined as joined
    from mt_parallel_state.job import leave_process_group as leave_process_group
    from mt_parallel_state.job import must_launch as must_launch
    from mt_parallel_state.launcher import launch as launch
    from mt_parallel_state.launcher import leading as leading
    from mt_parallel_state.signals import StopSignals as StopSignals
    from mt_parallel_state.signals import stop_signals as stop_signals
    from mt_parallel_state.store import JoinError as JoinError
else:
    # What apps call once is resolved at first use, to keep the import of a model short.
    __getattr__ = resolve_later(__name__)
