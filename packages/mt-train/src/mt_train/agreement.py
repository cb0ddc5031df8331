"""Small numbers on which ranks agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from mt_parallel_state import ParallelState, agreement_device
from torch import Tensor

WORLD = "tp-cp-dp-pp"


def summed(state: ParallelState, *values: float, axes: str = WORLD) -> list[float]:
    """Sum numbers in fp64 over the ranks of `axes`; each of these ranks calls it.

    The hosts agree, and none waits for its device if the group has a CPU backend.

    Returns:
        The sums, with the same bits on all ranks.
    """
    group = state.group(axes)
    if group is None:
        return [float(value) for value in values]
    where = agreement_device(group, state.device)
    shared = torch.tensor(values, dtype=torch.float64).to(where)
    dist.all_reduce(shared, group=group)
    return shared.tolist()


def uploaded(values: Sequence[float], device: torch.device) -> Tensor:
    """Copy numbers from the host to the device as fp64, without a wait of the host."""
    there = torch.tensor(values, dtype=torch.float64, pin_memory=device.type == "cuda")
    return there.to(device, non_blocking=True)
