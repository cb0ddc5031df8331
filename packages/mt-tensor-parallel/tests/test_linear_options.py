"""Gathered outputs, skipped biases, foreign weights, and layers that do not communicate."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_parallel_state import sharding_of
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear

F64 = torch.float64


def test_gathered_output_is_the_dense_one(ranks) -> None:
    def body() -> None:
        torch.manual_seed(0)
        dense = ColumnParallelLinear(4, (3, 8), shard_dim=1, bias=True, dtype=torch.float64)
        torch.manual_seed(0)
        split = ColumnParallelLinear(
            4, (3, 8), shard_dim=1, bias=True, dtype=torch.float64,
            group=dist.group.WORLD, gather_output=True,
        )  # fmt: skip
        x = torch.randn(2, 5, 4, dtype=torch.float64)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        whole, same = dense(a), split(b)
        torch.testing.assert_close(same, whole, rtol=1e-12, atol=1e-12)
        whole.square().sum().backward()
        same.square().sum().backward()
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-12, atol=1e-12)
        own = dense.weight.grad.chunk(2, 1)[dist.get_rank()]
        torch.testing.assert_close(split.weight.grad, own, rtol=1e-12, atol=1e-12)

    ranks(2, body)


def test_a_skipped_bias_and_a_foreign_weight() -> None:
    layer = RowParallelLinear((2, 3), 4, bias=True, skip_bias_add=True)
    x = torch.randn(1, 5, 2, 3)
    y, bias = layer(x)
    assert bias is layer.bias
    torch.testing.assert_close(y, F.linear(x.flatten(-2), layer.weight.flatten(1)))
    other = torch.randn(4, 2, 3, requires_grad=True)
    y, _ = layer(x, other)
    y.sum().backward()
    assert other.grad is not None
    assert layer.weight.grad is None


def test_a_skipped_bias_is_gathered_with_the_output(ranks) -> None:
    def body() -> None:
        options = {"shard_dim": 1, "bias": True, "dtype": F64}
        torch.manual_seed(0)
        dense = ColumnParallelLinear(4, (3, 2), **options)
        torch.manual_seed(0)
        options |= {"group": dist.group.WORLD, "gather_output": True, "skip_bias_add": True}
        split = ColumnParallelLinear(4, (3, 2), **options)  # a local bias [3, 1] would broadcast
        x = torch.randn(2, 5, 4, dtype=F64)
        whole = dense(x)
        y, bias = split(x)
        torch.testing.assert_close(y + bias, whole)
        whole.square().sum().backward()
        (y + bias).square().sum().backward()
        torch.testing.assert_close(split.bias.grad, dense.bias.grad.chunk(2, 1)[dist.get_rank()])

    ranks(2, body)


def test_an_expert_layer_leaves_communication_to_its_caller(ranks) -> None:
    def body() -> None:
        group = dist.group.WORLD
        layers = [
            RowParallelLinear(8, 4, group=group, axis="etp", communicate=False),
            ColumnParallelLinear(4, 8, group=group, axis="etp", communicate=False),
        ]
        for layer in layers:
            shape = (2, 3, 4)
            x = torch.randn(shape, requires_grad=True)
            torch.testing.assert_close(layer(x), F.linear(x, layer.weight))
            assert sharding_of(layer.weight).spec.axes == {"etp"}

    ranks(2, body)
    with pytest.raises(ValueError, match="sequence_parallel=True needs communicate=True"):
        ColumnParallelLinear(4, 8, sequence_parallel=True, communicate=False)
    with pytest.raises(ValueError, match="gather_output=True needs communicate=True"):
        ColumnParallelLinear(4, 8, gather_output=True, communicate=False)
    with pytest.raises(ValueError, match=r"added on every rank.*; use skip_bias_add=True"):
        RowParallelLinear(8, 4, bias=True, communicate=False)


def test_an_experts_bias_is_added_once_after_the_callers_sum(ranks) -> None:
    def body() -> None:
        group = dist.group.WORLD
        layer = RowParallelLinear(
            8, 4, group=group, bias=True, communicate=False, skip_bias_add=True
        )
        y, bias = layer(torch.zeros(2, 4))
        dist.all_reduce(y)
        assert torch.equal(y + bias, layer.bias.expand(2, 4))

    ranks(2, body)
