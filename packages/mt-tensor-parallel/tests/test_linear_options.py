"""Foreign weights, and layers that do not communicate."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_parallel_state import sharding_of
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear


def test_a_foreign_weight_is_used_in_place_of_the_own() -> None:
    layer = RowParallelLinear((2, 3), 4)
    x = torch.randn(1, 5, 2, 3)
    torch.testing.assert_close(
        layer(x), F.linear(x.flatten(-2), layer.weight.flatten(1), layer.bias)
    )
    other = torch.randn(4, 2, 3, requires_grad=True)
    layer(x, other).sum().backward()
    assert other.grad is not None
    assert layer.weight.grad is None


def test_an_expert_layer_leaves_communication_to_its_caller(ranks) -> None:
    def body() -> None:
        group = dist.group.WORLD
        layers = [
            RowParallelLinear(8, 4, group=group, axis="etp", communicate=False, bias=False),
            ColumnParallelLinear(4, 8, group=group, axis="etp", communicate=False, bias=False),
        ]
        for layer in layers:
            shape = (2, 3, 4)
            x = torch.randn(shape, requires_grad=True)
            torch.testing.assert_close(layer(x), F.linear(x, layer.weight))
            assert sharding_of(layer.weight).spec.axes == {"etp"}

    ranks(2, body)
    with pytest.raises(ValueError, match="sequence_parallel=True needs communicate=True"):
        ColumnParallelLinear(4, 8, sequence_parallel=True, communicate=False)
    with pytest.raises(ValueError, match=r"added on every rank.*; use bias=False and add one"):
        RowParallelLinear(8, 4, communicate=False)
