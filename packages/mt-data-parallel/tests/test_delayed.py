"""Weight gradients computed after backward, as in zero-bubble schedules."""

from collections import deque

import pytest
import torch
import torch.distributed as dist
from mt_data_parallel import shard
from torch import nn

STRATEGIES = ("none", "optimizer", "optimizer_gradients", "full")
BACKWARDS = 3


class _Later(torch.autograd.Function):
    """x @ weight.T, whose weight gradient is left in a queue."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.layer.queue.append(lambda: ctx.layer.add(grad.T @ x))
        return grad @ weight, None, None


class Layer(nn.Module):
    """A matrix whose gradients come when somebody takes them from the queue."""

    def __init__(self, queue):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64) / 3)
        self.queue, self.sink = queue, None

    def forward(self, x):
        return torch.tanh(_Later.apply(x, self.weight, self))

    def add(self, grad):
        out, accumulate = self.sink.begin()
        out.add_(grad) if accumulate else out.copy_(grad)
        self.sink.end()


def rows(rank, number):
    generator = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(4, 8, generator=generator, dtype=torch.float64, requires_grad=True)


def train(strategy, after_all):
    """Whether reductions wait for the queue, and this rank's sums."""
    torch.manual_seed(0)
    queue = deque()
    model = nn.Sequential(nn.ModuleList(Layer(queue) for _ in range(3)))
    layers = list(model[0])
    begun = []
    with shard(model, strategy, group=dist.group.WORLD, bucket_size=1) as buffer:
        for layer in layers:
            layer.sink = buffer.sink(layer.weight)
        buffer.start(BACKWARDS)
        for number in range(BACKWARDS):
            x = rows(dist.get_rank(), number)
            for layer in layers:
                x = layer(x)
            x.sum().backward()
            if after_all:
                continue
            while queue:
                queue.popleft()()
        begun.append(buffer.num_launched[0])
        while queue:
            queue.popleft()()
        begun.append(buffer.num_launched[0])
        buffer.finish()
        return begun, buffer.num_launched[1], {p.name: (p.start, p.grad) for p in buffer.shards()}


def reference(world_size):
    torch.manual_seed(0)
    weights = [torch.randn(8, 8, dtype=torch.float64) / 3 for _ in range(3)]
    weights = [weight.requires_grad_() for weight in weights]
    for rank in range(world_size):
        for number in range(BACKWARDS):
            x = rows(rank, number)
            for weight in weights:
                x = torch.tanh(x @ weight.T)
            x.sum().backward()
    return {f"0.{i}.weight": weight.grad.view(-1) for i, weight in enumerate(weights)}


@pytest.mark.parametrize("after_all", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_delayed_weight_gradients_are_reduced_once_they_are_there(ranks, strategy, after_all):
    expected = reference(2)
    for begun, total, grads in ranks(2, train, strategy, after_all):
        assert total == (9 if strategy in ("optimizer_gradients", "full") else 3)
        assert begun == ([0, total] if after_all else [total, total])
        for name, (start, grad) in grads.items():
            wanted = expected[name][start : start + grad.numel()]
            torch.testing.assert_close(grad.reshape(-1), wanted, rtol=1e-12, atol=1e-12)
