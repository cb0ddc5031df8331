"""What data-parallel ranks sum, and what they share out."""

from __future__ import annotations

from mt_data_parallel import Reduction
from mt_parallel_state import ParallelState

from mt_train.config import DataParallelSection

AXES = "dp-cp"


def reduction(section: DataParallelSection, state: ParallelState) -> Reduction:
    """Return who sums the gradients, and who keeps which part of the sums."""
    if section.strategy == "none":
        return Reduction(replicas=state.group(AXES))
    if section.replicas == 1:
        return Reduction(shards=state.group(AXES))
    inner = state.size(AXES) // section.replicas
    shards, replicas = state.level_groups(AXES, (inner, section.replicas))
    return Reduction(shards=shards, replicas=replicas)
