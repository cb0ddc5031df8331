"""Experts as separate linear layers, for code that works on such layers, as quantisation does."""

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

from mt_moe.experts.experts import GroupedLinear
from mt_moe.padding import only_first


class LinearExperts(nn.ModuleDict):
    """A `GroupedLinear` as a linear layer for each expert, named by the expert's index.

    The layers multiply one after the other. A module that replaces one of them is called with that
    expert's rows. The host waits for the counts.

    Args:
        layer: The layer whose weights the new ones share. Do not use it afterwards.
        group: The ranks over which each expert is sharded (etp).

    Raises:
        ValueError: Sharded experts have biases, which each rank would add.

    Shape:
        See `GroupedLinear`.
    """

    is_plain = False

    def __init__(self, layer: GroupedLinear, *, group: Group = None) -> None:
        super().__init__()
        self._width = layer.weight[0].shape[:-1].numel()
        if layer.bias is not None and layer.split == "in" and group_size(group) > 1:
            raise ValueError(
                "experts with biases can't be separate linear layers if etp shards them; use etp=1"
            )
        for number in range(len(layer.weight)):
            self[str(layer.gemms.first + number)] = _linear(layer, number, group)

    def forward(self, x: Tensor, counts: Tensor, *, exact: bool = True) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Multiply each row by the weight of its expert; see `GroupedLinear`."""
        sizes = counts.tolist()
        rows = x.split([*sizes, len(x) - sum(sizes)])
        pairs = zip(self.values(), rows[:-1], strict=True)
        parts = [linear(part).flatten(1) for linear, part in pairs if len(part)]
        y = torch.cat([*parts, x.new_zeros(len(rows[-1]), self._width)])
        return y if exact else only_first(y, counts.sum())


def _linear(layer: GroupedLinear, number: int, group: Group) -> nn.Module:
    """Return one expert as a layer that shares the memory of its weight."""
    weight = layer.weight[number].detach()
    *outputs, features = weight.shape
    ranks, is_out = group_size(group), layer.split == "out"
    # A rank that has the whole expert needs no collective, and may have a bias.
    settings: dict[str, Any] = {"group": group, "axis": "etp", "communicate": ranks == 1}
    settings |= {"bias": layer.bias is not None, "dtype": weight.dtype, "device": "meta"}
    if is_out:
        sizes = (*outputs[:-1], outputs[-1] * ranks)
        made = ColumnParallelLinear(features, sizes, shard_dim=len(sizes) - 1, **settings)
    else:
        made = RowParallelLinear(features * ranks, outputs[0], **settings)
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
    """Replace the grouped linear layers of a model by one linear layer for each expert.

    The layer of the fourth expert of `experts.up` is then `experts.up.3`.

    Args:
        model: Changed in place; the weights keep their memory.
        group: The ranks over which each expert is sharded (etp).

    Returns:
        The names of the replaced grouped layers.

    Raises:
        ValueError: Sharded experts have biases.
    """
    found = {n: m for n, m in model.named_modules() if isinstance(m, GroupedLinear)}
    for name, layer in found.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LinearExperts(layer, group=group))
    shardings(model)
    return list(found)
