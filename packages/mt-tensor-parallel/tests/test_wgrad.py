"""Weight gradients that are summed in place, and deferred ones."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from mt_parallel_state import WgradStore
from mt_tensor_parallel import (
    ColumnParallelLinear,
    Gemm,
    RowParallelLinear,
    TorchGemm,
    defer_weight_gradients,
    sum_weight_gradients,
)
from torch import Tensor, nn


class Sum:
    """A sink as an optimizer with fp32 sums would have it."""

    def __init__(self, param: Tensor, dtype: torch.dtype) -> None:
        self.total = torch.full_like(param, torch.nan, dtype=dtype)  # never read before it is set
        self.count = 0

    def begin(self) -> tuple[Tensor, bool]:
        return self.total, self.count > 0

    def end(self) -> None:
        self.count += 1


class PlainGemm(Gemm):
    """Only the three products."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x @ weight.T if bias is None else x @ weight.T + bias

    def dgrad(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        return grad_y @ weight

    def wgrad(self, grad_y: Tensor, x: Tensor) -> Tensor:
        return grad_y.flatten(0, -2).T @ x.flatten(0, -2)


class Pair(nn.Module):
    """A column- and a row-parallel layer, both with biases."""

    def __init__(self, group: dist.ProcessGroup | None, **settings: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        settings |= {"group": group, "bias": True}
        self.up = ColumnParallelLinear(6, (2, 8), shard_dim=1, **settings)
        self.down = RowParallelLinear((2, 8), 6, shard_dim=1, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def grads(net: Pair, x: Tensor, sums: torch.dtype, store: WgradStore | None = None):
    """The two weights' gradients over two micro-batches, from sinks, and what autograd got."""
    sinks = {param: Sum(param, sums) for param in (net.up.weight, net.down.weight)}
    sum_weight_gradients(net, sinks.get)
    defer_weight_gradients(net, store)
    for piece in x:
        y = net(piece).square().sum()
        counts = [sink.count for sink in sinks.values()]
        with store.deferring() if store is not None else nullcontext(lambda: None) as compute:
            y.backward()
        if store is not None:
            assert [sink.count for sink in sinks.values()] == counts
        compute()
    assert [sink.count for sink in sinks.values()] == [len(x)] * 2
    assert net.up.weight.grad is None
    assert net.down.weight.grad is None
    return [sink.total for sink in sinks.values()], [net.up.bias.grad, net.down.bias.grad]


def plain_grads(net: Pair, x: Tensor):
    sum_weight_gradients(net, lambda param: None)
    for piece in x:
        net(piece).square().sum().backward()
    return [net.up.weight.grad, net.down.weight.grad], [net.up.bias.grad, net.down.bias.grad]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("gemm", [TorchGemm(), PlainGemm()])
@pytest.mark.parametrize("deferred", [False, True])
def test_sums_in_place_are_those_of_autograd(
    ranks, world: int, sequence_parallel: bool, gemm, deferred: bool
) -> None:
    def body() -> None:
        settings = {"dtype": torch.float64, "sequence_parallel": sequence_parallel, "gemm": gemm}
        make = lambda: Pair(dist.group.WORLD, **settings)  # noqa: E731
        x = torch.randn(2, 3, 4, 6, dtype=torch.float64)
        store = WgradStore() if deferred else None
        ours, theirs = grads(make(), x, torch.float64, store), plain_grads(make(), x)
        for kind in (0, 1):
            for a, b in zip(ours[kind], theirs[kind], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    ranks(world, body)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_deferred_weight_gradients_are_those_of_backward(ranks, sequence_parallel: bool) -> None:
    def body() -> None:
        group = dist.group.WORLD
        options = {"group": group, "sequence_parallel": sequence_parallel, "dtype": torch.float64}
        results = []
        for store in (None, WgradStore()):
            torch.manual_seed(0)
            up = ColumnParallelLinear(4, (2, 6), shard_dim=1, bias=True, **options)
            down = RowParallelLinear((2, 6), 4, shard_dim=1, bias=True, **options)
            net = torch.nn.Sequential(up, down)
            hooked = []
            for param in net.parameters():
                param.register_post_accumulate_grad_hook(lambda p, to=hooked: to.append(p.shape))
            torch.manual_seed(dist.get_rank() if sequence_parallel else 5)
            x = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
            defer_weight_gradients(net, store)
            if store is None:
                for _ in range(2):
                    net(x).square().sum().backward()
            else:
                waiting = []
                for _ in range(2):
                    y = net(x)  # the switch is for the backward alone
                    with store.deferring() as compute:
                        y.square().sum().backward()
                    waiting.append(compute)
                assert up.weight.grad is None
                assert down.weight.grad is None
                hooked.clear()
                for compute in waiting:
                    compute()
                assert len(hooked) == 4  # as a gradient buffer needs
            results.append([x.grad, *(param.grad for param in net.parameters())])
        for plain, deferred in zip(*results, strict=True):
            torch.testing.assert_close(deferred, plain, rtol=1e-12, atol=1e-12)

    ranks(2, body)


def test_bf16_products_are_summed_in_fp32() -> None:
    x = torch.randn(8, 3, 4, 6, dtype=torch.bfloat16)
    (up, down), _ = grads(Pair(None, dtype=torch.bfloat16), x, torch.float32)
    net = Pair(None, dtype=torch.bfloat16)
    expected = [torch.zeros_like(p, dtype=torch.float32) for p in (net.up.weight, net.down.weight)]
    for piece in x:
        net(piece).square().sum().backward()
        for total, layer in zip(expected, (net.up, net.down), strict=True):
            total += layer.weight.grad
            layer.weight.grad = None
    torch.testing.assert_close([up, down], expected, rtol=0, atol=0)


def test_a_weight_from_elsewhere_and_a_frozen_one_have_no_sink() -> None:
    layer = ColumnParallelLinear(3, 2)
    sink = Sum(layer.weight, torch.float32)
    sum_weight_gradients(layer, lambda param: sink)
    foreign = torch.ones(2, 3, requires_grad=True)
    layer(torch.ones(1, 3), foreign).sum().backward()
    assert sink.count == 0
    assert foreign.grad.tolist() == [[1.0] * 3] * 2
    layer.weight.requires_grad_(requires_grad=False)
    sum_weight_gradients(layer, lambda param: sink)
    assert layer.grad_sink is None


@pytest.mark.parametrize("world", [1, 2])
def test_the_gradient_of_a_computed_weight_cannot_wait(ranks, world: int) -> None:
    def body() -> None:
        layer = ColumnParallelLinear(3, 4, bias=False, group=dist.group.WORLD)
        defer_weight_gradients(layer, store := WgradStore())
        root = torch.ones(12, requires_grad=True)
        with store.deferring() as compute:
            layer(torch.ones(1, 3), root[: 12 // world].view(-1, 3)).sum().backward()
        compute()
        assert root.grad.sum() == 12 // world  # a view of a parameter is fine
        y = layer(torch.ones(1, 3), (root * root)[: 12 // world].view(-1, 3))
        computed = r"cannot wait in a store: it was computed by MulBack"
        with store.deferring(), pytest.raises(ValueError, match=computed):
            y.sum().backward()
        layer(torch.ones(1, 3), (root * root)[: 12 // world].view(-1, 3)).sum().backward()
        assert root.grad.sum() == 3 * (12 // world)

    ranks(world, body)


@pytest.mark.parametrize("needs_input", [False, True])
def test_a_compiled_layer_adds_to_its_sink_and_copies_to_their_own(needs_input: bool) -> None:
    layer = ColumnParallelLinear(3, 2)
    sink = Sum(layer.weight, torch.float32)
    sum_weight_gradients(layer, lambda param: sink)
    run = torch.compile(lambda module, x: module(x), backend="aot_eager", fullgraph=True)
    x = torch.ones(1, 3, requires_grad=needs_input)
    run(layer, x).sum().backward()
    assert sink.count == 1  # of an input without a gradient too, where nothing reads a result
    assert sink.total.tolist() == [[1.0] * 3] * 2
    assert layer.weight.grad is None
    assert layer.bias.grad.tolist() == [1.0] * 2
    other = copy.deepcopy(layer)
    run(other, x).sum().backward()
    assert sink.count == 1
    assert other.grad_sink.count == 2  # it was copied with the layer


def test_a_compiled_layer_waits_with_its_sink() -> None:
    layer = ColumnParallelLinear(3, 2, bias=False)
    sink = Sum(layer.weight, torch.float32)
    sum_weight_gradients(layer, lambda param: sink)
    defer_weight_gradients(layer, store := WgradStore())
    run = torch.compile(lambda x: layer(x.sin()).cos(), backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 3, requires_grad=True)
    layer(x.sin()).cos().sum().backward()
    expected, sink.count = sink.total.clone(), 0
    with store.deferring() as compute:
        run(x).sum().backward()
        assert sink.count == 0
    compute()
    assert sink.count == 1
    torch.testing.assert_close(sink.total, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_fused_kernel_adds_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grad_y, x = (torch.randn(2, 64, n, device="cuda", dtype=dtype) for n in (32, 48))
    out = torch.full((4, 8, 48), torch.nan, device="cuda")
    exact = grad_y.flatten(0, 1).double().T @ x.flatten(0, 1).double()
    for times in (1, 2):
        TorchGemm().wgrad_into(grad_y, x, out, accumulate=times > 1)
        torch.testing.assert_close(out.view(32, 48).double(), times * exact, rtol=1e-4, atol=1e-3)
