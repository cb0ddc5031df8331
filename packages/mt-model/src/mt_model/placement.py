"""Where the layers of one stage live, and what one forward pass shares between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

import torch
import torch.distributed as dist
from mt_parallel_state import PartitionSpec, shard_param
from mt_tensor_parallel import Gemm
from torch import Tensor, nn

if TYPE_CHECKING:
    from mt_model.cache import KVCache


class LinearArguments(TypedDict):
    """Arguments that all parallel linear layers of a model share."""

    group: dist.ProcessGroup | None
    sequence_parallel: bool
    gemm: Gemm
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What every layer's constructor needs to know about this rank.

    Attributes:
        group: ranks that share each layer's weights, or None.
        tp: size of the group.
        tp_index: this rank's place in it.
        sequence_parallel: activations between the parallel regions are split over the sequence.
        seed: of dropout.
        gemm: computes the linear layers.
        dtype: of the parameters.
        device: of the parameters.
    """

    group: dist.ProcessGroup | None
    tp: int
    tp_index: int
    sequence_parallel: bool
    seed: int
    gemm: Gemm
    dtype: torch.dtype
    device: torch.device

    def linear_arguments(self) -> LinearArguments:
        """For the constructors of parallel linear layers; they draw nothing (`GPT` does)."""
        return {
            "group": self.group,
            "sequence_parallel": self.sequence_parallel,
            "gemm": self.gemm,
            "dtype": self.dtype,
            "device": torch.device("meta"),
        }

    def mark_replicated(self, module: nn.Module, *, partial: bool) -> None:
        """Record on the module's parameters that every rank holds them whole.

        Args:
            module: a norm or a position table.
            partial: each rank's gradient covers only its own heads or tokens.
        """
        for param in module.parameters():
            shard_param(param, PartitionSpec(), partial_grad=("tp",) if partial else ())


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What the layers of one forward pass share.

    Attributes:
        length: tokens per sequence, over all ranks.
        start: position of the first token; above 0 only with a cache.
        tables: rotary tables of this pass by (head_dim, theta).
        sample_ids: for the dropout of attention weights; None without dropout.
        hidden_index: global index of each element of the hidden states; None without dropout.
        cache: keys and values of earlier tokens, or None.
    """

    length: int
    start: int = 0
    tables: dict[tuple[int, float], Tensor] = field(default_factory=dict)
    sample_ids: Tensor | None = None
    hidden_index: Tensor | None = None
    cache: KVCache | None = None
