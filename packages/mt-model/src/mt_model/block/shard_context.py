"""This rank's share of a model, as the constructors of its layers need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
import torch.distributed as dist
from mt_files import multiples_near
from mt_moe import ExpertGroups
from mt_parallel_state import PartitionSpec, all_gather, copy_to_group, shard_param
from mt_tensor_parallel import Gemm
from torch import Tensor, nn

from mt_model.attend.sequence import SequenceAttend
from mt_model.kernels.config import Kernels


class LinearArguments(TypedDict):
    """Arguments that all parallel linear layers of a model share."""

    group: dist.ProcessGroup | None
    sequence_parallel: bool
    gemm: Gemm
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class ShardContext:
    """This rank's share of a model, for the constructor of every layer.

    Attributes:
        group: Ranks that share each layer's weights, or None.
        tp: Size of the group.
        tp_index: This rank's place in the group.
        sequence_parallel: Activations between the parallel regions are split over the sequence.
        seed: Seed of dropout.
        gemm: Strategy that computes the linear layers.
        dtype: Dtype of the parameters.
        device: Device of the parameters.
        context: Ranks that share the sequences, and attention over them.
        kernels: Kernel of each operation.
        recomputed: Modules that backward recomputes (`RecomputePlan.modules`).
        experts: Ranks that share experts.
        offloads: Whether activations wait in the host's memory.
    """

    group: dist.ProcessGroup | None
    tp: int
    tp_index: int
    sequence_parallel: bool
    seed: int
    gemm: Gemm
    dtype: torch.dtype
    device: torch.device
    context: SequenceAttend
    kernels: Kernels
    experts: ExpertGroups = ExpertGroups()  # noqa: RUF009 - it is frozen
    recomputed: frozenset[str] = frozenset()
    offloads: bool = False

    def linear_arguments(self) -> LinearArguments:
        """Return arguments for parallel linear layers, whose weights stay on the meta device."""
        return {
            "group": self.group,
            "sequence_parallel": self.sequence_parallel,
            "gemm": self.gemm,
            "dtype": self.dtype,
            "device": torch.device("meta"),
        }

    def check_length(self, length: int) -> None:
        """Check that the ranks can share sequences of `length` tokens evenly."""
        context = self.context.size
        parts = (2 * context if context > 1 else 1) * (self.tp if self.sequence_parallel else 1)
        if length % parts:
            raise ValueError(
                f"sequence length {length} does not divide by {parts}, which cp={context} and "
                f"tp={self.tp} with sequence_parallel={self.sequence_parallel} need. Nearest that "
                f"does: {multiples_near(length, parts)}"
            )

    def mark_replicated(self, module: nn.Module, *, partial: bool) -> None:
        """Record on the module's parameters that every rank holds them whole.

        Args:
            module: A norm or a position table.
            partial: Each rank's gradient covers only its own heads or tokens.
        """
        for param in module.parameters():
            shard_param(param, PartitionSpec(), partial_grad=("tp",) if partial else ())

    def mark_split(self, owner: nn.Module | nn.Parameter, *, dim: int) -> None:
        """Record on the module's parameters, or on one, that a rank holds its part of a dim."""
        axes = () if self.group is None else (*(None,) * dim, "tp")
        for param in [owner] if isinstance(owner, nn.Parameter) else owner.parameters():
            shard_param(param, PartitionSpec(*axes))

    def between(self, x: Tensor, *, dim: int) -> Tensor:
        """Return this rank's tokens between the parallel regions.

        Args:
            x: Tensor over all tokens of the group.
            dim: Dim of the tokens.
        """
        if not self.sequence_parallel:
            return x
        return x.chunk(self.tp, dim=dim)[self.tp_index]

    def enter(self, x: Tensor) -> Tensor:
        """Gather a module's input once, for several layers with `communicate=False`.

        All-gather along the sequence under sequence parallelism (backward reduce-scatter), else
        nothing (backward all-reduce).
        """
        if self.sequence_parallel:
            return all_gather(x, self.group, dim=1)
        return copy_to_group(x, self.group)
