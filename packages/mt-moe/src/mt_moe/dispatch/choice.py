"""The dispatchers, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from mt_kernels import Candidate, Registry
from mt_parallel_state import group_size

from mt_moe.dispatch.all_gather import AllGatherDispatcher
from mt_moe.dispatch.all_to_all import AllToAllDispatcher
from mt_moe.dispatch.deep_ep import DeepEPDispatcher, deep_ep_obstacle
from mt_moe.dispatch.dispatcher import Dispatcher
from mt_moe.dispatch.local import LocalDispatcher
from mt_moe.groups import ExpertGroups

Make: TypeAlias = Callable[[int, ExpertGroups], Dispatcher]


def _local_obstacle(num_experts: int, groups: ExpertGroups) -> str | None:
    del num_experts
    ranks = group_size(groups.experts)
    return None if ranks == 1 else f"it is for one rank, and {ranks} share the experts"


# Functions and obstacles get the number of experts and the groups.
DISPATCHERS: Registry[Make] = Registry(
    "dispatcher",
    (
        Candidate("local", lambda num_experts, _: LocalDispatcher(num_experts), _local_obstacle),
        Candidate("all_to_all", AllToAllDispatcher),
        Candidate("all_gather", AllGatherDispatcher),
        Candidate("deepep", DeepEPDispatcher, deep_ep_obstacle),
    ),
)


def make_dispatcher(name: str, num_experts: int, groups: ExpertGroups) -> Dispatcher:
    """Make a dispatcher by its name; "auto" is local on one rank and otherwise all-to-all.

    Raises:
        KernelError: There is no such dispatcher, or it can't serve these groups.
    """
    return DISPATCHERS.find(name, num_experts, groups).function(num_experts, groups)
