"""Compiled layers on several ranks give the numbers of eager ones."""

from __future__ import annotations

from collections.abc import Sequence

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


class Boxed(TorchGemm):
    """torch's products of operands other than tensors."""

    def operand(self, x: Tensor, role: str) -> tuple[Tensor]:
        return (x,)

    def saved(self, operand: tuple[Tensor]) -> tuple[Tensor, ...]:
        return operand

    def restored(self, tensors: Sequence[Tensor], role: str) -> tuple[Tensor]:
        return (tensors[0],)

    def gather(self, operand: tuple[Tensor], group: dist.ProcessGroup):
        wait = super().gather(operand[0], group)
        return lambda: (wait(),)

    def forward(self, x: tuple[Tensor], weight: tuple[Tensor], bias: Tensor | None = None):
        return super().forward(x[0], weight[0], bias)

    def dgrad(self, grad_y: tuple[Tensor], weight: tuple[Tensor]) -> Tensor:
        return super().dgrad(grad_y[0], weight[0])

    def wgrad(self, grad_y: tuple[Tensor], x: tuple[Tensor]) -> Tensor:
        return super().wgrad(grad_y[0], x[0])


# A layer is a node of the graph, unless it keeps something else than tensors for backward.
@pytest.mark.parametrize(
    ("sequence_parallel", "gemm", "breaks"),
    [
        (True, TorchGemm(), False),
        pytest.param(False, OtherGemm(), False, marks=pytest.mark.campaign),
        (True, Boxed(), True),
    ],
)
def test_compiled_layers_give_the_numbers_of_eager(
    ranks, sequence_parallel: bool, gemm, breaks: bool
) -> None:
    def body() -> None:
        from torch._dynamo.utils import counters  # the rank's own: globals travel as copies

        counters.clear()
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
        assert bool(counters["graph_break"]) == breaks

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


@pytest.mark.parametrize("row", [False, True])
def test_the_operators_keep_what_torch_asks_of_them(row: bool) -> None:
    layer = (RowParallelLinear if row else ColumnParallelLinear)(4, 3, dtype=torch.float64)
    mode, x = "row" if row else "column", torch.randn(2, 5, 4, dtype=torch.float64)
    tensors = x.requires_grad_(), layer.weight, layer.bias
    kind = layer._number, mode, 1, False
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    operators = torch.ops.mt_tensor_parallel
    torch.library.opcheck(operators.linear.default, (*tensors, *kind), test_utils=checks)
    given = torch.randn(2, 5, 3, dtype=torch.float64), x.detach(), layer.weight.detach(), *kind
    for needs in ((True, True, True), (False, True, False), (True, False, False)):
        args = (*given, *needs)
        torch.library.opcheck(operators.linear_backward.default, args, test_utils=checks)
