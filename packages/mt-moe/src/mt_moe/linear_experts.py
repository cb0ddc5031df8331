"""Experts as linear layers of their own, for what works on such layers, as quantisation does."""

from __future__ import annotations

from typing import Any

import torch
from mt_parallel_state import (
    Group,
    MatrixSpec,
    PartitionSpec,
    group_size,
    mark_matrix,
    shard_param,
    shardings,
)
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from mt_moe.dispatch import only_first
from mt_moe.experts import GroupedLinear


class LinearExperts(nn.ModuleDict):
    """A `GroupedLinear` whose experts are linear layers, by their numbers among all.

    They multiply one after the other, and whatever takes the place of one is called for its rows.
    The host waits for the numbers of rows.

    Args:
        layer: Whose weights they share; it is of no use after that.
        group: The ranks that cut an expert (etp).

    Raises:
        ValueError: Experts that ranks cut have biases, which would be added on each.

    Shape:
        As `GroupedLinear`.
    """

    is_plain = False

    def __init__(self, layer: GroupedLinear, *, group: Group = None) -> None:
        super().__init__()
        self._width = layer.weight[0].shape[:-1].numel()
        if layer.bias is not None and layer.split == "in" and group_size(group) > 1:
            raise ValueError(
                "experts with biases can't be linear layers of their own where ranks cut them; "
                "use etp=1"
            )
        for number in range(len(layer.weight)):
            self[str(layer.gemms.first + number)] = _linear(layer, number, group)

    def forward(self, x: Tensor, counts: Tensor, *, exact: bool = True) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Multiply each row with its expert's weight; see `GroupedLinear`."""
        sizes = counts.tolist()
        rows = x.split([*sizes, len(x) - sum(sizes)])
        pairs = zip(self.values(), rows[:-1], strict=True)
        parts = [linear(part).flatten(1) for linear, part in pairs if len(part)]
        y = torch.cat([*parts, x.new_zeros(len(rows[-1]), self._width)])
        return y if exact else only_first(y, counts.sum())


def _linear(layer: GroupedLinear, number: int, group: Group) -> nn.Module:
    """Return one expert of a layer; it has the memory of its weight."""
    weight = layer.weight[number].detach()
    *outputs, features = weight.shape
    ranks, is_out = group_size(group), layer.split == "out"
    # On one rank nothing is left to the caller, and a bias may be had.
    how: dict[str, Any] = {"group": group, "axis": "etp", "communicate": ranks == 1}
    how |= {"bias": layer.bias is not None, "dtype": weight.dtype, "device": "meta"}
    if is_out:
        sizes = (*outputs[:-1], outputs[-1] * ranks)
        made = ColumnParallelLinear(features, sizes, shard_dim=len(sizes) - 1, **how)
    else:
        made = RowParallelLinear(features * ranks, outputs[0], **how)
    dim = len(outputs) - 1 if is_out else 1
    spec = PartitionSpec() if ranks == 1 else PartitionSpec(*(None,) * dim, "etp")
    made.weight = shard_param(_param(weight, layer.weight), spec)
    mark_matrix(made.weight, MatrixSpec(in_dims=1))
    if layer.bias is not None:
        bias = _param(layer.bias[number].detach(), layer.bias)
        made.bias = shard_param(bias, spec if is_out else PartitionSpec())
    return made.train(layer.training)


def _param(tensor: Tensor, like: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=like.requires_grad)


def unfuse_experts(model: nn.Module, *, group: Group = None) -> list[str]:
    """Make the experts of a model linear layers of their own, `experts.up.3` the fourth one's.

    Args:
        model: Changed in place; weights stay where they are.
        group: The ranks that cut an expert (etp).

    Returns:
        The names of what was one layer of several experts before.

    Raises:
        ValueError: Experts that ranks cut have biases.
    """
    found = {n: m for n, m in model.named_modules() if isinstance(m, GroupedLinear)}
    for name, layer in found.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LinearExperts(layer, group=group))
    shardings(model)
    return list(found)
