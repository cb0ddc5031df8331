"""The average of the weights: its formula, where it lies, and that it resumes."""

import copy

import pytest
import torch
from mt_data_parallel import GradBuffer, Reduction
from mt_optim import EMA, AdamW, DistributedOptimizer, OptimizerConfig, build_optimizer
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn

STATE = ParallelState(ParallelLayout())


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)).to(dtype)


def loss(model, step, part=slice(None)):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    return model(x[part].to(model[0].weight.dtype)).square().sum()


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_average_is_the_formula_of_the_masters(dtype):
    model = make_model(dtype)
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.01, ema=0.3), STATE)
    expected = {name: optimizer.master(name).clone() for name in optimizer.names}
    for step in range(1, 8):
        train(model, optimizer, [step])
        decay = min(0.3, (1 + step) / (10 + step))
        for name, value in expected.items():
            expected[name] = decay * value + (1 - decay) * optimizer.master(name)
    assert optimizer.ema is not None
    for name, value in expected.items():
        found = optimizer.ema.value(name)
        assert found.dtype == optimizer.master(name).dtype
        torch.testing.assert_close(
            found, value, rtol=1e-5 if dtype != torch.float64 else 1e-13, atol=0
        )


def test_a_skipped_step_does_not_count():
    model = make_model()
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.01, ema=0.9, skip_above=1e-9), STATE)
    assert optimizer.ema is not None
    before = optimizer.ema.value("0.weight").clone()
    train(model, optimizer, range(3))
    assert torch.equal(optimizer.ema.value("0.weight"), before)


def test_a_state_dict_brings_the_average_and_restart_forgets_it():
    straight, resumed = make_model(), make_model()
    config = OptimizerConfig(lr=0.01, ema=0.9)
    first, second = (build_optimizer(model, config, STATE) for model in (straight, resumed))
    train(straight, first, range(4))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    resumed.load_state_dict(straight.state_dict())
    train(straight, first, range(4, 8))
    train(resumed, second, range(4, 8))
    assert first.ema is not None
    assert second.ema is not None
    for name in first.names:
        assert torch.equal(first.ema.value(name), second.ema.value(name))
        assert not torch.equal(first.ema.value(name), first.master(name))
    first.ema.restart()
    assert all(torch.equal(first.ema.value(n), first.master(n)) for n in first.names)


def sharded(world):
    with ParallelState(ParallelLayout(dp=world)) as state:
        model, config = make_model(), OptimizerConfig(lr=0.01, ema=0.9)
        group = Reduction(shards=state.group("dp"))
        with GradBuffer(model.named_parameters(), group=group, bucket_size=64) as buffer:
            optimizer = DistributedOptimizer(
                buffer, lambda shards: build_optimizer(shards, config, state)
            )
            for step in range(6):
                buffer.start(1)
                loss(model, step, slice(state.rank, None, world)).backward()
                buffer.finish()
                optimizer.step()
            ema = optimizer.inner.ema
            assert ema is not None
            return [
                (shard.name, shard.start, shard.end, ema.value(shard.name).clone())
                for shard in optimizer.shards
            ]


def test_the_average_is_sharded_like_the_optimizer(ranks):
    model = make_model()
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.01, ema=0.9), STATE)
    train(model, optimizer, range(6))
    assert optimizer.ema is not None
    seen = 0
    for shards in ranks(2, sharded, 2):
        for name, start, end, value in shards:
            whole = optimizer.ema.value(name).reshape(-1)
            torch.testing.assert_close(value.reshape(-1), whole[start:end], rtol=1e-12, atol=1e-14)
            seen += end - start
    assert seen == sum(param.numel() for param in model.parameters())


def test_a_decay_that_is_none_is_refused():
    optimizer = AdamW(make_model().parameters())
    with pytest.raises(ValueError, match=r"decay must be a number in \[0, 1\), got 1.0"):
        EMA(optimizer, 1.0)
    with pytest.raises(ValueError, match=r"ema must be a number in \[0, 1\), got 2"):
        OptimizerConfig(lr=0.1, ema=2)
    with pytest.raises(KeyError, match="no parameter 'x'"):
        EMA(optimizer, 0.5).value("x")
