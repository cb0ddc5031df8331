"""Where the layers of one stage live, and what one forward pass shares between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict, get_args

import torch
import torch.distributed as dist
from mt_context_parallel import Algorithm, HierarchicalGroups, positions
from mt_files import multiples_near
from mt_parallel_state import ParallelState, PartitionSpec, shard_param
from mt_tensor_parallel import Gemm
from torch import Tensor, nn

from mt_model.config import Recompute


class LinearArguments(TypedDict):
    """Arguments that all parallel linear layers of a model share."""

    group: dist.ProcessGroup | None
    sequence_parallel: bool
    gemm: Gemm
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Context:
    """How this rank shares its sequences with other ranks.

    Attributes:
        group: the ranks that share a sequence, or None.
        algorithms: how attention gets at the others' keys, in each of the model's layers.
        levels: of the group, for the hierarchical algorithm.
    """

    group: dist.ProcessGroup | None = None
    algorithms: tuple[Algorithm, ...] = ()
    levels: HierarchicalGroups | None = None

    @staticmethod
    def create(
        state: ParallelState,
        algorithm: Algorithm | Sequence[Algorithm],
        inner_size: int | None,
        *,
        layers: int,
    ) -> Context:
        """Make it, with the levels that the algorithm needs. Collective over the group.

        Raises:
            ValueError: an unknown algorithm, or an inner size that does not divide cp.
        """
        algorithms = (algorithm,) * layers if isinstance(algorithm, str) else tuple(algorithm)
        if len(algorithms) != layers:
            raise ValueError(
                f"context_algorithm has {len(algorithms)} algorithms, but the model has {layers} "
                "layers. Give one for each, or one for all"
            )
        group, size, levels = state.group("cp"), state.size("cp"), None
        for name in algorithms:
            if name not in get_args(Algorithm):
                raise ValueError(
                    f"context_algorithm must be one of {get_args(Algorithm)}, got {name!r}"
                )
        if group is not None and "hierarchical" in algorithms:
            if not inner_size or size % inner_size:
                valid = [n for n in range(1, size + 1) if size % n == 0]
                raise ValueError(
                    f"context_inner_size={inner_size} does not divide cp={size}, which the "
                    f"hierarchical algorithm needs; use one of {valid}"
                )
            inner, outer = state.level_groups("cp", (inner_size, size // inner_size))
            levels = HierarchicalGroups(inner=inner, outer=outer)
        return Context(group=group, algorithms=algorithms, levels=levels)

    def attention_group(self, layer: int) -> dist.ProcessGroup | HierarchicalGroups | None:
        """What the attention of a layer takes as its group."""
        return self.levels if self.algorithms[layer] == "hierarchical" else self.group

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return 1 if self.group is None else self.group.size()

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Positions of this rank's tokens in sequences of `length`. Returns [length / size]."""
        rank = 0 if self.group is None else self.group.rank()
        return positions(length, ranks=self.size, rank=rank, device=device)


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
        context: the ranks that share the sequences.
        recompute: which activations are computed again in backward.
    """

    group: dist.ProcessGroup | None
    tp: int
    tp_index: int
    sequence_parallel: bool
    seed: int
    gemm: Gemm
    dtype: torch.dtype
    device: torch.device
    context: Context = field(default_factory=Context)
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        if self.recompute not in get_args(Recompute):
            raise ValueError(
                f"recompute must be one of {get_args(Recompute)}, got {self.recompute!r}"
            )

    def linear_arguments(self) -> LinearArguments:
        """For the constructors of parallel linear layers; they draw nothing (`GPT` does)."""
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
            module: a norm or a position table.
            partial: each rank's gradient covers only its own heads or tokens.
        """
        for param in module.parameters():
            shard_param(param, PartitionSpec(), partial_grad=("tp",) if partial else ())
