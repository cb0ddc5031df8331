"""What ranks that exchange tokens must agree on, compared before they do."""

from __future__ import annotations

import torch
from mt_parallel_state import Group, share_json

from mt_moe.error import RoutingError


class Agreement:
    """Compares settings between the ranks of a group, once, at the first use.

    Args:
        group: None is one rank, which agrees with itself.
    """

    def __init__(self, group: Group) -> None:
        self.group, self._agreed = group, False

    def check(self, device: torch.device, **settings: object) -> None:
        """Raise RoutingError on every rank if some setting differs."""
        if self._agreed or self.group is None:
            return
        mine = {name: str(value) for name, value in settings.items()}
        found = share_json(mine, self.group, device=device)
        for name in mine:
            values = [each.get(name) for each in found]
            if len(set(values)) > 1:
                shown = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                raise RoutingError(
                    f"the ranks of the experts' group differ in {name} ({shown}); build the same "
                    "layer on each of them"
                )
        self._agreed = True
