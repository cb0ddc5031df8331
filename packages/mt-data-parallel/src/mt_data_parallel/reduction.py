"""The groups over which a gradient is summed, and the part of the sum that each rank keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """The reduction of some parameters' gradients.

    Only `replicas`: an all-reduce, after which every rank has the whole sum. Only `shards`: a
    reduce-scatter, after which every rank has its part (ZeRO). Both: a reduce-scatter inside of
    `shards`, and an all-reduce of the parts over `replicas` (hybrid sharding: shards inside of a
    node, replicas between nodes). Neither: one rank, no communication.

    The default is a plain sum, which suits a loss divided by the global token count.
    For the mean over `D` ranks, of which those with the same experts are `E`: `scale=1 / D` for
    all parameters, or `average` for dense ones and `average` with `scale=E / D` for experts. Per
    token: a plain sum, and `GradBuffer.finish(scale=1 / tokens)`.

    Attributes:
        replicas: Ranks that keep the same part of the sum.
        shards: Ranks that keep different parts of it, in the order of their rank in the group.
        reduce_dtype: Dtype of the gradients in messages; None for the dtype of the buffer.
        local_sum: Send each part of the addends to the rank that keeps it, which adds them in fp32
            (fp64 for an fp64 buffer): one rounding to `reduce_dtype`, however many ranks there are.
            The sums of replicas are gathered in the dtype of the buffer.
        scale: Multiplies every addend before the sum.
        average: Divide the sum by the number of ranks, in the collective.
    """

    replicas: dist.ProcessGroup | None = None
    shards: dist.ProcessGroup | None = None
    reduce_dtype: torch.dtype | None = None
    local_sum: bool = False
    scale: float = 1.0
    average: bool = False

    def __post_init__(self) -> None:
        dtype, scale = self.reduce_dtype, self.scale
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"reduce_dtype must be a torch.dtype or None, got {dtype!r:.60}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"reduce_dtype must be a floating-point dtype, got {dtype}")
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise TypeError(f"scale must be a number, got {scale!r:.60}")
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"scale must be positive and finite, got {scale}")
        for name in ("replicas", "shards"):
            group = getattr(self, name)
            if group is not None and not isinstance(group, dist.ProcessGroup):
                raise TypeError(f"{name} must be a ProcessGroup or None, got {group!r:.60}")
            if group is not None and group.size() == 1:
                object.__setattr__(self, name, None)

    @property
    def num_shards(self) -> int:
        """Number of shards that the reduced result is split into."""
        return 1 if self.shards is None else self.shards.size()

    @property
    def shard(self) -> int:
        """The index of the part that this rank keeps."""
        return 0 if self.shards is None else self.shards.rank()

    @property
    def peers(self) -> tuple[int, ...]:
        """The global ranks of `shards`; empty if nothing is cut."""
        return () if self.shards is None else tuple(dist.get_process_group_ranks(self.shards))

    @property
    def is_sum(self) -> bool:
        """Whether there are several ranks."""
        return self.shards is not None or self.replicas is not None

    @property
    def addend_scale(self) -> float:
        """The factor of each gradient in the sum."""
        copies = 1 if self.replicas is None else self.replicas.size()
        return self.scale / (self.num_shards * copies) if self.average else self.scale

    @property
    def replica(self) -> int:
        """The index of this rank among the ranks with the same part."""
        return 0 if self.replicas is None else self.replicas.rank()


GroupLike = dist.ProcessGroup | Reduction | None
GroupChoice = GroupLike | Callable[[str, Tensor], GroupLike]


def reduction_of(choice: GroupChoice, name: str, param: Tensor) -> Reduction:
    """Return the reduction of a parameter; a plain group is a group of replicas.

    Raises:
        TypeError: `choice` is not a valid group of a GradBuffer.
    """
    if choice is None or isinstance(choice, dist.ProcessGroup | Reduction):
        found = choice
    elif callable(choice):
        found = choice(name, param)
    else:
        raise TypeError(
            f"group must be a ProcessGroup, a Reduction, None (one rank), or a function of name "
            f"and parameter that returns one of these; got {choice!r:.60}"
        )
    if found is None or isinstance(found, dist.ProcessGroup):
        return Reduction(replicas=found)
    if not isinstance(found, Reduction):
        raise TypeError(
            f"group returned {found!r:.60} for parameter {name!r}; return a ProcessGroup, a "
            "Reduction or None (one rank)"
        )
    return found
