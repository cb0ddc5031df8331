"""Under autocast every layout computes what one rank computes, and gradients have the dtype of
what they belong to."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_fusions import LossOptions
from mt_parallel_state import WgradStore, copy_to_group, gather_from_group, scatter_to_group
from mt_tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    defer_weight_gradients,
    linear_cross_entropy,
    sum_weight_gradients,
)
from torch import Tensor, nn


class Pair(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None = None, **settings: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        settings |= {"group": group, "bias": True}
        self.up = ColumnParallelLinear(12, (2, 8), shard_dim=1, **settings)
        self.down = RowParallelLinear((2, 8), 12, shard_dim=1, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, grad = torch.randn(2, 2, 8, 12, dtype=dtype)
    return x, grad


def run(net: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor | None]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(x)
    y.backward(grad.to(y.dtype))
    grads = {name: param.grad for name, param in net.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def near(actual: Tensor | None, expected: Tensor | None, tolerance: float = 2e-2) -> None:
    assert actual is not None
    assert expected is not None
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance * float(expected.abs().max())
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranks_compute_what_one_computes(ranks, sequence_parallel: bool, dtype) -> None:
    def body() -> None:
        group = dist.group.WORLD
        x, grad = inputs(dtype)
        expected = run(Pair(dtype=dtype), x, grad)
        split = Pair(group, sequence_parallel=sequence_parallel, dtype=dtype)
        if sequence_parallel:
            x, grad = (scatter_to_group(t, group, dim=1) for t in (x, grad))
        actual = run(split, x, grad)
        if sequence_parallel:
            dist.all_reduce(actual["down.bias"])
            actual |= {name: gather_from_group(actual[name], group, dim=1) for name in ("y", "x")}
        for name, dim in (("up.weight", 1), ("up.bias", 1), ("down.weight", 2)):
            actual[name] = gather_from_group(actual[name], group, dim=dim)
        # torch's autocast leaves fp64 alone.
        assert actual["y"].dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
        for name, value in expected.items():
            near(actual[name], value, 1e-12 if dtype == torch.float64 else 2e-2)

    ranks(2, body)


@pytest.mark.parametrize("world", [1, 2])
def test_weight_gradients_that_wait_are_those_of_backward(ranks, world: int) -> None:
    def body() -> None:
        now, store = Pair(dist.group.WORLD), WgradStore()
        expected = run(now, *inputs())
        later = Pair(dist.group.WORLD)
        defer_weight_gradients(later, store)
        with store.deferring() as compute:
            actual = run(later, *inputs())
        assert later.up.weight.grad is None
        compute()
        actual |= {name: param.grad for name, param in later.named_parameters()}
        for name, value in expected.items():
            near(actual[name], value)

    ranks(world, body)


class Sum:
    def __init__(self, param: Tensor) -> None:
        self.total = torch.zeros_like(param)

    def begin(self) -> tuple[Tensor, bool]:
        return self.total, True

    def end(self) -> None:
        pass


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("deferred", [False, True])
def test_gradients_reach_the_sink_of_the_uncast_weight(ranks, world: int, deferred: bool) -> None:
    def body() -> None:
        expected = run(Pair(dist.group.WORLD), *inputs())
        net, store = Pair(dist.group.WORLD), WgradStore()
        sinks = {param: Sum(param) for param in (net.up.weight, net.down.weight)}
        sum_weight_gradients(net, sinks.get)
        defer_weight_gradients(net, store)
        with store.deferring() if deferred else nullcontext(lambda: None) as compute:
            run(net, *inputs())
        compute()
        for name in ("up", "down"):
            weight = net.get_submodule(name).weight
            assert weight.grad is None
            near(sinks[weight].total, expected[f"{name}.weight"])

    ranks(world, body)


@pytest.mark.parametrize("world", [1, 2])
def test_head_and_loss_compute_what_all_logits_give(ranks, world: int) -> None:
    def body() -> None:
        group = dist.group.WORLD if world > 1 else None
        torch.manual_seed(0)
        whole = [torch.randn(n, 16).requires_grad_() for n in (9, 12)]
        labels = torch.randint(0, 12, (9,))
        own = [
            whole[0].detach().clone().requires_grad_(),
            whole[1].detach().chunk(world)[dist.get_rank()].clone().requires_grad_(),
        ]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = F.linear(*whole)
            expected = F.cross_entropy(logits.float(), labels, reduction="sum")
            loss = linear_cross_entropy(
                *(copy_to_group(own[0], group), own[1], labels),
                options=LossOptions(block_size=4),
                group=group,
            )
        (expected / 257).backward()
        (loss / 257).backward()
        near(loss, expected, 1e-2)
        near(own[0].grad, whole[0].grad)
        near(own[1].grad, whole[1].grad.chunk(world)[dist.get_rank()])

    ranks(world, body)
