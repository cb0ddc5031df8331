"""Defects that data parallelism of other frameworks had; docs/mt-optim.md has the whole list."""

import copy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from mt_data_parallel import Reduction, shard
from mt_parallel_state import ParallelLayout, ParallelState
from mt_testing import sample
from torch import nn

STRATEGIES = ("none", "optimizer", "optimizer_gradients", "full")
LAYERS, ROWS = 5, 4


class Whole(nn.Module):
    """A model of several layers, each a unit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(layers).double()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def rows(number):
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(number)).double()


def gradients(strategy, group, backwards, **options):
    """The gradients of this rank's pieces, flat and by name."""
    model = Whole()
    with shard(model, strategy, group=group, **options) as buffer:
        found = {}
        for repeat in range(2):  # the second step starts from nothing again
            buffer.start(len(backwards))
            for number in backwards:
                model(rows(number)).backward()
            buffer.finish()
            for piece in buffer.shards():
                found[piece.name, piece.start, piece.end, repeat] = piece.grad.flatten().clone()
            buffer.gather_params()
    return found


def expected_gradients(backwards):
    model = Whole()
    for number in backwards:
        model(rows(number)).backward()
    return {name: param.grad.flatten() for name, param in model.named_parameters()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_never_scales_gradients_whatever_the_layers(strategy):
    # Megatron-FSDP: a data-parallel group of one rank multiplied gradients by 2 for each layer.
    expected = expected_gradients([0, 1, 2])
    found = gradients(strategy, None, [0, 1, 2])
    assert {name for name, *_ in found} == expected.keys()
    for (name, start, end, _), grad in found.items():
        torch.testing.assert_close(grad, expected[name][start:end], rtol=1e-14, atol=1e-14)


def alone_in_a_group(strategy):
    """The same with process groups of one rank each."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    return gradients(strategy, Reduction(shards=groups[dist.get_rank()]), [0, 1, 2])


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_a_group_of_one_rank_never_scales_gradients(ranks, strategy):
    expected = expected_gradients([0, 1, 2])
    for found in ranks(2, alone_in_a_group, strategy):
        assert {name for name, *_ in found} == expected.keys()
        for (name, start, end, _), grad in found.items():
            torch.testing.assert_close(grad, expected[name][start:end], rtol=1e-14, atol=1e-14)


def in_instances(strategy, overlap, bucket_size):
    with ParallelState(ParallelLayout(dp=4)) as state:
        inner, outer = state.level_groups("dp", (2, 2))
        group = Reduction(shards=inner, replicas=outer)
        own = [2 * state.rank, 2 * state.rank + 1]
        return gradients(strategy, group, own, overlap=overlap, bucket_size=bucket_size)


@pytest.mark.parametrize(
    ("strategy", "overlap", "bucket_size"),
    sample(product(STRATEGIES[1:], (True, False), (1, 100, None)), every=5),
)
def test_overlap_with_two_instances_sums_each_sample_once(ranks, strategy, overlap, bucket_size):
    # Megatron-LM: overlap with several instances of the distributed optimizer was wrong once.
    expected = expected_gradients(range(8))
    results = ranks(4, in_instances, strategy, overlap, bucket_size)
    for first in (0, 2):
        covered = dict.fromkeys(expected, 0)
        for found in results[first : first + 2]:
            for (name, start, end, repeat), grad in found.items():
                torch.testing.assert_close(grad, expected[name][start:end], rtol=1e-13, atol=1e-13)
                covered[name] += (end - start) if repeat == 0 else 0
        assert covered == {name: grad.numel() for name, grad in expected.items()}


def test_what_a_caller_gives_is_never_written():
    # Megatron-LM: the configuration's bucket size was changed where it was read.
    model = Whole()
    params = list(model.named_parameters())
    backwards = {name: 2 for name, _ in params}
    options = {"bucket_size": 10, "overlap": True}
    given = copy.deepcopy((options, backwards)), list(params)
    with shard(model, "full", group=None, named_params=params, **options) as buffer:
        buffer.start(backwards)
        for _ in range(2):
            model(rows(0)).backward()
        buffer.finish()
        assert {piece.name for piece in buffer.shards()} == backwards.keys()
    assert ((options, backwards), params) == given


def after_the_block(strategy):
    """Parameters as they are once a `with` block was left, right after a step."""
    model = Whole()
    group = Reduction(shards=dist.group.WORLD)
    with shard(model, strategy, group=group, bucket_size=10) as buffer:
        buffer.start(1)
        model(rows(dist.get_rank())).backward()
        buffer.finish()
        with torch.no_grad():
            for piece in buffer.shards():
                piece.param.sub_(piece.grad, alpha=0.1)
        buffer.gather_params()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("strategy", ["optimizer", "optimizer_gradients"])
def test_parameters_are_there_when_the_block_is_left(ranks, strategy):
    model = Whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        model(rows(number)).backward()
    optimizer.step()
    for params in ranks(4, after_the_block, strategy):
        for own, other in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(own, other.detach(), rtol=1e-12, atol=1e-12)
