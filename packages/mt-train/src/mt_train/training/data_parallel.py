"""Reduction of gradients and sharding of parameters over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from mt_data_parallel import Reduction
from mt_model import DTYPES
from mt_parallel_state import ParallelState, sharding_of
from torch import Tensor, nn

from mt_train.config.parallel_section import DataParallelSection
from mt_train.config.run_config import RunConfig

AXES = "dp-cp"
EXPERT_AXES = "edp"  # axes for weights that ranks of experts share


def reduction(
    section: DataParallelSection, state: ParallelState
) -> Callable[[str, Tensor], Reduction]:
    """Return the reduction of each parameter's gradients: its ranks, its form and its sharding."""
    dense = _reduction(section, state, AXES)
    if state.size("ep") == 1 and state.size("etp") == state.size("tp"):
        return lambda name, param: dense  # the ranks of the expert view are those of the dense one
    expert = _reduction(section, state, EXPERT_AXES)

    def choose(name: str, param: Tensor) -> Reduction:
        del name
        axes = sharding_of(cast("nn.Parameter", param)).spec.axes
        return expert if axes & {"ep", "etp"} else dense

    return choose


def _reduction(section: DataParallelSection, state: ParallelState, axes: str) -> Reduction:
    how: dict[str, Any] = {"local_sum": section.local_sum}
    if section.reduce_dtype is not None:
        how["reduce_dtype"] = DTYPES[section.reduce_dtype]
    if section.strategy == "none":
        return Reduction(replicas=state.group(axes), **how)
    if section.replicas == 1:
        return Reduction(shards=state.group(axes), **how)
    inner = state.size(axes) // section.replicas
    shards, replicas = state.level_groups(axes, (inner, section.replicas))
    return Reduction(shards=shards, replicas=replicas, **how)


def shard_options(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of `mt_data_parallel.shard` that the configuration names."""
    section, prefetch = config.data_parallel, config.data_parallel.prefetch
    is_whole = config.waits_for_whole_parameters or config.training.cuda_graphs != "none"
    grad_dtype, shard_dtype = section.grad_dtype, section.shard_dtype
    return {
        "bucket_size": config.parallel.bucket_size,
        "overlap": section.overlap,
        "prefetch": int(not is_whole) if prefetch is None else prefetch,
        "grad_dtype": None if grad_dtype is None else DTYPES[grad_dtype],
        "pad_for_bandwidth": section.pad_for_bandwidth,
        "shard_dtype": None if shard_dtype is None else DTYPES[shard_dtype],
        "offload": section.offload,
        "unused": section.unused,
    }
