"""Layers made of torch's own: the same values, split."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_parallel_state import gather_from_group, scatter_to_group, sharding_of
from mt_tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    choose_gemms,
    defer_weight_gradients,
    sum_weight_gradients,
)
from torch import Tensor, nn

F64 = torch.float64


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_an_mlp_split_in_place_computes_what_it_did(ranks, world, sequence_parallel) -> None:
    def body() -> None:
        group, rank = dist.group.WORLD, dist.get_rank()
        whole, split = _mlp(), _mlp()
        options = {"group": group, "sequence_parallel": sequence_parallel}
        split[0] = ColumnParallelLinear.from_linear(split[0], **options)
        split[2] = RowParallelLinear.from_linear(split[2], **options)
        x = torch.randn(2, 4, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
        y = whole(x)
        if sequence_parallel:
            mine = gather_from_group(split(scatter_to_group(x, group, dim=1)), group, dim=1)
        else:
            mine = split(x)
        torch.testing.assert_close(mine, y, rtol=1e-12, atol=1e-12)
        y.square().sum().backward()
        mine.square().sum().backward()
        pairs = {
            split[0].weight: whole[0].weight.grad.chunk(world)[rank],
            split[0].bias: whole[0].bias.grad.chunk(world)[rank],
            split[2].weight: whole[2].weight.grad.chunk(world, 1)[rank],
        }
        for param, grad in pairs.items():
            torch.testing.assert_close(param.grad, grad, rtol=1e-12, atol=1e-12)
        partial = sharding_of(split[2].bias).partial_grad
        assert partial == (("tp",) if sequence_parallel else ())

    ranks(world, body)


def test_a_fused_projection_keeps_a_dim_per_part(ranks) -> None:
    def body() -> None:
        group, rank = dist.group.WORLD, dist.get_rank()
        torch.manual_seed(0)
        up, down = nn.Linear(4, 16, dtype=F64), nn.Linear(16, 4, bias=False, dtype=F64)
        column = ColumnParallelLinear.from_linear(up, sizes=(2, 8), shard_dim=1, group=group)
        row = RowParallelLinear.from_linear(down, sizes=(2, 8), shard_dim=1, group=group)
        x = torch.randn(1, 3, 4, dtype=F64)
        dist.broadcast(x, 0)
        own = up(x).unflatten(-1, (2, 8)).chunk(2, -1)[rank]
        torch.testing.assert_close(column(x), own, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(row(column(x)), down(up(x)), rtol=1e-12, atol=1e-12)
        assert row.bias is None
        assert sharding_of(column.weight).spec.axes == {"tp"}

    ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, F64])
def test_bits_dtype_device_and_what_is_frozen_stay(dtype: torch.dtype) -> None:
    linear = nn.Linear(4, 8, dtype=dtype).eval()
    linear.weight.requires_grad_(requires_grad=False)
    for made in (ColumnParallelLinear.from_linear(linear), RowParallelLinear.from_linear(linear)):
        assert torch.equal(made.weight, linear.weight)
        assert torch.equal(made.bias, linear.bias)
        assert made.weight.dtype == dtype
        assert (made.weight.requires_grad, made.bias.requires_grad) == (False, True)
        assert made.weight.data_ptr() != linear.weight.data_ptr()
        assert not made.training
    on_meta = ColumnParallelLinear.from_linear(nn.Linear(4, 8, device="meta"))
    assert on_meta.weight.device.type == "meta"


def test_an_embedding_is_split_by_rows(ranks) -> None:
    def body() -> None:
        group = dist.group.WORLD
        torch.manual_seed(0)
        whole = nn.Embedding(8, 4, dtype=F64)
        split = VocabParallelEmbedding.from_embedding(whole, group=group)
        ids = torch.tensor([[0, 3, 7, 4]])
        y, mine = whole(ids), split(ids)
        assert torch.equal(mine, y)
        y.square().sum().backward()
        mine.square().sum().backward()
        own = whole.weight.grad.chunk(2)[dist.get_rank()]
        torch.testing.assert_close(split.weight.grad, own, rtol=1e-12, atol=0)

    ranks(2, body)


def test_what_cannot_be_split_is_named(ranks) -> None:
    for made in (ColumnParallelLinear, RowParallelLinear):
        for wrong in (None, nn.Conv1d(1, 1, 1), made(2, 2)):
            with pytest.raises(TypeError, match="linear must be a Linear, got"):
                made.from_linear(wrong)
    with pytest.raises(ValueError, match=r"sizes=\(3, 2\) must multiply to the 8 out_features"):
        ColumnParallelLinear.from_linear(nn.Linear(4, 8), sizes=(3, 2))
    with pytest.raises(ValueError, match=r"sizes=5 must multiply to the 4 in_features"):
        RowParallelLinear.from_linear(nn.Linear(4, 8), sizes=5)
    with pytest.raises(TypeError, match="embedding must be an Embedding, got Linear"):
        VocabParallelEmbedding.from_embedding(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="has padding_idx=0, which a split table does not do"):
        VocabParallelEmbedding.from_embedding(nn.Embedding(4, 2, padding_idx=0))

    def body() -> None:
        with pytest.raises(
            ValueError, match=r"out_features\[0\] of \(7,\) is 7, which the 2 ranks"
        ):
            ColumnParallelLinear.from_linear(nn.Linear(4, 7), group=dist.group.WORLD)

    ranks(2, body)


def test_biases_are_there_by_default_as_in_torch() -> None:
    x: Tensor = torch.zeros(1, 4)
    for layer in (ColumnParallelLinear(4, 4), RowParallelLinear(4, 4), nn.Linear(4, 4)):
        assert torch.equal(layer(x)[0], layer.bias)
        assert (F.linear(x, layer.weight) == 0).all()


@pytest.mark.parametrize("change", [choose_gemms, defer_weight_gradients, sum_weight_gradients])
def test_what_changes_layers_names_what_is_no_module(change) -> None:
    with pytest.raises(TypeError, match="module must be a Module, got None"):
        change(None, None)
