"""What data-parallel ranks sum, and what they share out."""

from __future__ import annotations

from typing import Any

from mt_data_parallel import Reduction
from mt_model import DTYPES
from mt_parallel_state import ParallelState

from mt_train.config import RunConfig
from mt_train.parallel_section import DataParallelSection

AXES = "dp-cp"


def reduction(section: DataParallelSection, state: ParallelState) -> Reduction:
    """Return who sums the gradients, how, and who keeps which part of the sums."""
    how: dict[str, Any] = {"local_sum": section.local_sum}
    if section.reduce_dtype is not None:
        how["reduce_dtype"] = DTYPES[section.reduce_dtype]
    if section.strategy == "none":
        return Reduction(replicas=state.group(AXES), **how)
    if section.replicas == 1:
        return Reduction(shards=state.group(AXES), **how)
    inner = state.size(AXES) // section.replicas
    shards, replicas = state.level_groups(AXES, (inner, section.replicas))
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
