"""Options for making the process group of an axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from mt_files import Checks

from mt_parallel_state.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Settings of the groups of one axes string; None keeps the library's default.

    Attributes:
        timeout: Timeout of this group's collectives, of gloo too.
        high_priority: Whether NCCL runs the group on a high-priority stream, for communication that
            the next layer needs, such as expert all-to-all.
        min_ctas: Smallest number of thread blocks that NCCL uses.
        max_ctas: Largest number; fewer leave more of the GPU to overlapped computation.
        cluster_size: Number of thread blocks in an NCCL cluster (Hopper and later).
        net_name: NCCL's network plugin.

    Raises:
        ValueError: A setting is of another type or out of range, or `min_ctas` is above `max_ctas`.
    """

    timeout: timedelta | None = None
    high_priority: bool = False
    min_ctas: int | None = None
    max_ctas: int | None = None
    cluster_size: int | None = None
    net_name: str | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "min_ctas", "max_ctas")
        checks.at_most(32, "min_ctas", "max_ctas")
        checks.at_least(0, "cluster_size")
        checks.at_most(8, "cluster_size")
        checks.done()
        if self.min_ctas and self.max_ctas and self.min_ctas > self.max_ctas:
            raise ValueError(f"min_ctas={self.min_ctas} is above max_ctas={self.max_ctas}")
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise ValueError(f"timeout={self.timeout} must be above 0")

    def for_nccl(self) -> Any:
        """Return the `ProcessGroupNCCL.Options` of these settings, but for the timeout."""
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=self.high_priority)
        for name, value in (
            ("min_ctas", self.min_ctas),
            ("max_ctas", self.max_ctas),
            ("cga_cluster_size", self.cluster_size),
            ("net_name", self.net_name),
        ):
            if value is not None:
                setattr(options.config, name, value)
        return options


def check_options(layout: ParallelLayout, options: Mapping[str, GroupOptions]) -> None:
    """Refuse options of unknown axes, and different ones for names of the same ranks.

    It looks at every group of the layout, so all ranks find the same.

    Raises:
        ValueError: As said.
    """
    named: dict[tuple[int, ...], str] = {}
    for axes, given in options.items():
        for group in layout.groups(axes):
            first = named.setdefault(tuple(group), axes)
            if len(group) > 1 and options[first] != given:
                raise ValueError(
                    f"options[{first!r}] and options[{axes!r}] differ, but both names stand for "
                    f"the group of ranks {group}; leave one of them out"
                )
