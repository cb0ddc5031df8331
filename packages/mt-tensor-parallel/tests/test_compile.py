"""Compiled layers on several ranks give the numbers of eager ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear, TorchGemm
from torch import Tensor, nn


class OtherGemm(TorchGemm):
    """torch's products, by another name."""


class Pair(nn.Module):
    def __init__(self, **settings: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        settings |= {"group": dist.group.WORLD, "bias": True, "dtype": torch.float64}
        self.up = ColumnParallelLinear(6, (2, 8), shard_dim=1, **settings)
        self.down = RowParallelLinear((2, 8), 6, shard_dim=1, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


@pytest.mark.parametrize(("sequence_parallel", "gemm"), [(True, TorchGemm()), (False, OtherGemm())])
def test_compiled_layers_give_the_numbers_of_eager(ranks, sequence_parallel: bool, gemm) -> None:
    def body() -> None:
        net = Pair(sequence_parallel=sequence_parallel, gemm=gemm)
        torch.manual_seed(dist.get_rank() if sequence_parallel else 5)
        data, grad = torch.randn(2, 2, 4, 6, dtype=torch.float64)
        results = []
        for module in (net, torch.compile(net, backend="aot_eager")):
            net.zero_grad()
            x = data.clone().requires_grad_()
            y = module(x)
            y.backward(grad)
            results.append([y.detach(), x.grad, *(param.grad for param in net.parameters())])
        for compiled, eager in zip(*reversed(results), strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)

    ranks(2, body, timeout=300)


def test_a_compiled_layer_under_autocast_is_the_eager_one(ranks) -> None:
    def body() -> None:
        torch.manual_seed(0)
        layer = RowParallelLinear(8, 6, group=dist.group.WORLD, bias=True)
        x, results = torch.randn(2, 3, 4), []
        for module in (layer, torch.compile(layer, backend="aot_eager")):
            layer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = module(x)
            y.square().sum().backward()
            results.append([y.detach(), *(param.grad for param in layer.parameters())])
        for compiled, eager in zip(*reversed(results), strict=True):
            torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2)

    ranks(2, body, timeout=300)
