"""Classes of torch that look at whole parameters are refused parts, and right with the whole."""

import pytest
import torch
from mt_data_parallel import GradBuffer, Reduction
from mt_optim import DistributedOptimizer, OptimizerConfig, build_optimizer
from mt_parallel_state import ParallelLayout, ParallelState, PartitionSpec, shard_param
from torch import nn

CONFIG = OptimizerConfig(name="torch.optim.Adafactor", lr=0.02)
STEPS, ROWS = 10, 4


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 3)).double()


def loss(model, step, rows):
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return model(x[rows]).square().sum()


def train(whole):
    """Train with the state shared out; return the parameters, or why not."""
    with ParallelState(ParallelLayout(dp=2)) as state:
        model, group = make_model(), Reduction(shards=state.group("dp"))
        named = model.named_parameters()
        with GradBuffer(named, group=group, bucket_size=100, whole=whole) as buffer:
            try:
                optimizer = DistributedOptimizer(
                    buffer, lambda shards: build_optimizer(shards, CONFIG, state)
                )
            except ValueError as error:
                return str(error)
            for step in range(STEPS):
                buffer.start(1)
                loss(model, step, slice(state.rank, None, 2)).backward()
                buffer.finish()
                optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_ranges_are_refused_by_name_with_the_way_out(ranks):
    refused = [text for text in ranks(2, train, None) if isinstance(text, str)]
    assert refused
    for text in refused:
        assert "torch.optim.Adafactor looks at whole parameters and this is a part" in text
        assert "give the GradBuffer whole=lambda name, param: True" in text
        assert text.startswith("parameter '")


def test_whole_parameters_step_like_one_process(ranks):
    model = make_model()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.02, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, slice(None)).backward()
        optimizer.step()
    expected = dict(model.named_parameters())
    for params in ranks(2, train, lambda name, param: True):
        for name, param in params.items():
            torch.testing.assert_close(param, expected[name].detach(), rtol=1e-12, atol=1e-12)


def split(name):
    """Make an optimizer for a parameter that tensor-parallel ranks share."""
    with ParallelState(ParallelLayout(tp=2)) as state:
        param = shard_param(nn.Parameter(torch.zeros(4, 4)), PartitionSpec("tp"))
        try:
            config = OptimizerConfig(name=name, lr=0.1)
            return build_optimizer([("weight", param)], config, state).names
        except ValueError as error:
            return str(error)


def test_shards_of_tensor_parallelism_are_refused_too(ranks):
    for text in ranks(2, split, "torch.optim.Adafactor"):
        assert text == (
            "parameter 'weight': torch.optim.Adafactor looks at whole parameters and this is a "
            "part of one; train it without tensor parallelism, or by another optimizer"
        )


@pytest.mark.parametrize("name", ["torch.optim.RAdam", "torch.optim.Adagrad"])
def test_what_looks_at_elements_takes_any_part(ranks, name):
    assert ranks(2, split, name) == [("weight",)] * 2
