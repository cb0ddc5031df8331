"""Small numbers on which ranks agree."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mt_parallel_state import ParallelState

WORLD = "tp-cp-dp-pp"


def summed(state: ParallelState, *values: float, axes: str = WORLD) -> list[float]:
    """Sum numbers in fp64 over the ranks of `axes`; every one of them calls it.

    Returns:
        The sums, with the same bits on all ranks.
    """
    group = state.group(axes)
    if group is None:
        return [float(value) for value in values]
    shared = torch.tensor(values, dtype=torch.float64).to(state.device)
    dist.all_reduce(shared, group=group)
    return shared.tolist()
