"""The storage of a sharded model in memory: time, place and dtype."""

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
    """The storage of a sharded model in memory.

    Attributes:
        unit_of: Function from a parameter's name to its unit; each unit is one bucket. None cuts
            buckets by size.
        release: Tensors to release while they are not needed: `gradients` (each backward then has
            its own reduction), `all` (parameters too, which have to be fetched), or `nothing`.
        init: Function that fills a parameter, by its name, once it has memory.
        param_dtype: Dtype in which parameters are gathered and computed; None for their own.
        shard_dtype: Dtype of the shards that the optimizer steps; None for the parameters' own.
        offload: Keep shards and their gradients in the host's memory.
        encoding: Format of the codes in which some parameters are held and gathered; None for none.
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
        """Whether shards have memory of their own, even on one rank."""
        return self.offload or self.param_dtype is not None or self.shard_dtype is not None
