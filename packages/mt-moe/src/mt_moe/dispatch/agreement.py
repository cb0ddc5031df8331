"""A check that ranks agree on their settings before they exchange tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from mt_parallel_state import Group, group_size, share_json

from mt_moe.error import RoutingError


class Agreement:
    """Compares the settings of the ranks of groups, once, at the first use.

    Args:
        *groups: The groups, in the same order on all ranks; None is a single rank.

    Attributes:
        reached: Whether the settings were compared, or need not be.
    """

    def __init__(self, *groups: Group) -> None:
        self.groups = [group for group in dict.fromkeys(groups) if group_size(group) > 1]
        self.reached = not self.groups

    def check(self, device: torch.device, **settings: object) -> None:
        """Raise RoutingError on every rank of all groups if a setting differs."""
        if self.reached:
            return
        mine: dict[str, str | None] = {name: str(value) for name, value in settings.items()}
        fault: str | None = None
        for group in self.groups:  # a fault found in one group is passed on to the next
            found = share_json({"fault": fault, **mine}, group, device=device)
            reported = (each["fault"] for each in found if each["fault"])
            fault = fault or next(reported, None) or _difference(found, list(mine))
        if fault is not None:
            raise RoutingError(fault)
        self.reached = True


def _difference(found: Sequence[Mapping[str, str | None]], names: Sequence[str]) -> str | None:
    for name in names:
        values = [each.get(name) for each in found]
        if len(set(values)) > 1:
            shown = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            return (
                f"ranks that share experts or tokens differ in {name} ({shown}); build the same "
                "layer on each of them"
            )
    return None
