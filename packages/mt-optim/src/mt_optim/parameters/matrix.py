"""The matrices of parameters: which there are, and how they lie on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch.distributed as dist
from mt_data_parallel import ParamShard
from mt_parallel_state import (
    MatrixSpec,
    ParallelState,
    PartitionSpec,
    all_gather,
    group_rank,
    group_size,
    sharding_of,
)
from torch import Tensor, nn

# Parts of names that say "a table or a head" in the models of the field.
_TABLES = ("wte", "wpe", "head", "lm_head", "output", "classifier")


def matrix_spec(param: Tensor) -> MatrixSpec:
    """Return the matrices that form a parameter.

    Its sharding record names them; without an entry, a tensor with two dims is one matrix.

    Raises:
        ValueError: It is not a matrix.
    """
    found = sharding_of(cast("nn.Parameter", param)).matrix
    if found is None and param.dim() != 2:
        raise ValueError(
            f"it is no matrix, with shape {tuple(param.shape)}; mark its rows and columns with "
            "mt_parallel_state.mark_matrix, or step it with AdamW"
        )
    return MatrixSpec() if found is None else found


def check_whole(shard: ParamShard, who: str) -> None:
    """Check that a shard is a whole parameter.

    Raises:
        ValueError: It is a range of one.
    """
    if not shard.is_whole:
        raise ValueError(
            f"{who} needs whole matrices and this is a range of one; give the GradBuffer "
            "whole=is_hidden_matrix"
        )


def is_hidden_matrix(name: str, param: Tensor) -> bool:
    """Return whether a parameter is a hidden matrix, which Muon and SOAP step.

    Args:
        name: The parameter's name. Biases, embeddings and heads are excluded by their names.
        param: The parameter.
    """
    if not isinstance(name, str) or not isinstance(param, Tensor):
        raise TypeError(f"expected a name and a parameter, got {name!r:.60} and {param!r:.60}")
    if sharding_of(cast("nn.Parameter", param)).matrix is not None:
        return True
    words = name.split(".")
    is_table = any("embed" in word or word in _TABLES for word in words)
    return param.dim() == 2 and not is_table and not words[-1].endswith("bias")


def by_matrix(matrices: str, others: str) -> Callable[[str, Tensor], str]:
    """Return a rule filter: one rule for hidden matrices, one for all others."""
    return lambda name, param: matrices if is_hidden_matrix(name, param) else others


class TPSplit:
    """The split of a parameter over the ranks of a layout, read from its sharding record.

    Args:
        param: The parameter.
        state: Process groups; None if nothing is split.

    Raises:
        ValueError: The parameter is split, and there is no state or a dim has several axes.
    """

    def __init__(self, param: Tensor, state: ParallelState | None) -> None:
        spec: PartitionSpec = sharding_of(cast("nn.Parameter", param)).spec
        self.groups: dict[int, dist.ProcessGroup] = {}
        for dim, axes in enumerate(spec.dims):
            if axes and state is None:
                raise ValueError(f"it is split over {'-'.join(axes)}; give state, which has groups")
            if len(axes) > 1:
                raise ValueError(f"dim {dim} is split over several axes ({', '.join(axes)})")
            group = state.group(axes[0]) if axes and state is not None else None
            if group is not None:
                self.groups[dim] = group

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole parameter, given the shape of a shard."""
        ranks = [group_size(self.groups.get(dim)) for dim in range(len(shape))]
        return tuple(size * n for size, n in zip(shape, ranks, strict=True))

    def gather(self, x: Tensor) -> Tensor:
        """Gather the whole tensor from the shards of all ranks."""
        for dim, group in self.groups.items():
            x = all_gather(x.contiguous(), group, dim=dim)
        return x

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's shard, a view."""
        for dim, group in self.groups.items():
            size = whole.size(dim) // group_size(group)
            whole = whole.narrow(dim, group_rank(group) * size, size)
        return whole

    def one(self, dims: int) -> tuple[dist.ProcessGroup | None, str]:
        """Return the group of the only split dim, and whether it is among the "rows" or "columns".

        Args:
            dims: Number of leading dims that form the rows.

        Raises:
            ValueError: Several dims are split.
        """
        if len(self.groups) > 1:
            raise ValueError(f"dims {sorted(self.groups)} are split; use tp='duplicated'")
        for dim, group in self.groups.items():
            return group, "rows" if dim < dims else "columns"
        return None, "rows"
