"""Which dispatcher sends a layer's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mt_files import kernel_for
from mt_parallel_state import group_size

from mt_moe.all_gather import AllGatherDispatcher
from mt_moe.all_to_all import AllToAllDispatcher
from mt_moe.deep_ep import DeepEPDispatcher, deep_ep_obstacle
from mt_moe.dispatch import Dispatcher, LocalDispatcher
from mt_moe.groups import ExpertGroups


@dataclass(frozen=True, kw_only=True)
class DispatcherKind:
    """One way to send tokens.

    Attributes:
        name: In messages, and to ask for it.
        make: Of the number of experts and the groups.
        obstacle: Why it can't serve these; None where it serves.
    """

    name: str
    make: Callable[[int, ExpertGroups], Dispatcher]
    obstacle: Callable[[int, ExpertGroups], str | None]


def _local_obstacle(num_experts: int, groups: ExpertGroups) -> str | None:
    ranks = group_size(groups.experts)
    return None if ranks == 1 else f"it is for one rank, and {ranks} share the experts"


def _serves(num_experts: int, groups: ExpertGroups) -> None:
    return None


DISPATCHERS = (
    DispatcherKind(
        name="local", make=lambda number, _: LocalDispatcher(number), obstacle=_local_obstacle
    ),
    DispatcherKind(name="all_to_all", make=AllToAllDispatcher, obstacle=_serves),
    DispatcherKind(name="all_gather", make=AllGatherDispatcher, obstacle=_serves),
    DispatcherKind(name="deepep", make=DeepEPDispatcher, obstacle=deep_ep_obstacle),
)


def make_dispatcher(name: str, num_experts: int, groups: ExpertGroups) -> Dispatcher:
    """Make the dispatcher of a name; "auto" is local on one rank, and else all-to-all.

    Raises:
        ValueError: There is none of this name, or it does not serve.
    """
    return kernel_for(DISPATCHERS, name, num_experts, groups).make(num_experts, groups)
