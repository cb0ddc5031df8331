"""What a sharded buffer keeps in memory: when, where and in which dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mt_data_parallel.encoding import Encoding

Release = Literal["nothing", "gradients", "all"]


@dataclass(frozen=True, kw_only=True)
class ShardingPolicy:
    """What of a sharded model is in memory when, where, and in which dtype.

    Attributes:
        unit_of: Gives the unit of a parameter by its name; each unit is a bucket of its own. None:
            buckets are cut by their size.
        release: `gradients`, from a backward to their reduction, of which every backward has one
            then; `all`, the parameters too, which somebody has to fetch; or `nothing`.
        init: Fills a parameter without memory, by its name, as soon as it has some.
        param_dtype: What parameters are gathered and computed in; None for their own.
        shard_dtype: What is stepped, and kept; None for the parameters' own.
        offload: Keep what is stepped, and its gradients, in the host's memory.
        encoding: Holds and gathers some parameters as codes; None for none.
    """

    unit_of: Callable[[str], str] | None = None
    release: Release = "nothing"
    init: Callable[[str, Tensor], None] | None = None
    param_dtype: torch.dtype | None = None
    shard_dtype: torch.dtype | None = None
    offload: bool = False
    encoding: Encoding | None = None

    @property
    def is_apart(self) -> bool:
        """Whether what is stepped differs from what is computed with, even on one rank."""
        return self.offload or self.param_dtype is not None or self.shard_dtype is not None
