"""QK-clip: its formula, and factors that reach masters wherever and however they are kept."""

import pytest
import torch
from mt_data_parallel import GradBuffer, Reduction
from mt_optim import DistributedOptimizer, OptimizerConfig, QKClip, build_optimizer
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_both_factors_bring_a_score_back_to_the_threshold(alpha):
    logits = torch.tensor([-5.0, 99.0, 100.0, 250.0, 1e6], dtype=torch.float64)
    query, key = QKClip(threshold=100.0, alpha=alpha).scales(logits)
    clipped = logits * query * key
    expected = torch.tensor([-5.0, 99.0, 100.0, 100.0, 100.0], dtype=torch.float64)
    torch.testing.assert_close(clipped, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(query[3], torch.tensor(0.4, dtype=torch.float64) ** alpha)


def test_a_head_that_no_rank_has_seen_is_left_alone():
    query, key = QKClip().scales(torch.tensor([-torch.inf]))
    assert (query.item(), key.item()) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.0}, "threshold: .*greater"),
        ({"alpha": 1.5}, "alpha: .*large"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        QKClip(**options)


def make_model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)).to(dtype)


def factors():
    rows = torch.linspace(0.5, 1.5, 20, dtype=torch.float64)
    return {"0.weight": rows[:, None], "elsewhere": torch.ones(1)}


def train(dtype, world=1, masters="full", rescales=True):
    with ParallelState(ParallelLayout(dp=world)) as state:
        model = make_model(dtype)
        config = OptimizerConfig(lr=0.02, masters=masters, ema=0.0)
        group = Reduction(shards=state.group("dp"))
        with GradBuffer(model.named_parameters(), group=group, bucket_size=64) as buffer:
            optimizer = DistributedOptimizer(
                buffer, lambda shards: build_optimizer(shards, config, state)
            )
            optimizer.inner.rescale = factors if rescales else None
            for step in range(1):
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
                buffer.start(1)
                (model(x.to(dtype)).square().sum() / world).backward()
                buffer.finish()
                optimizer.step()
            inner = optimizer.inner
            assert inner.ema is not None
            for name in inner.names:
                torch.testing.assert_close(inner.ema.value(name), inner.master(name))
            masters_here = {shard.name: inner.master(shard.name) for shard in optimizer.shards}
        return {name: p.detach().clone() for name, p in model.named_parameters()}, masters_here


def test_factors_multiply_what_the_update_gave():
    plain, _ = train(torch.float64, rescales=False)
    scaled, _ = train(torch.float64)
    torch.testing.assert_close(scaled["0.weight"], plain["0.weight"] * factors()["0.weight"])
    assert all(torch.equal(scaled[n], plain[n]) for n in plain if n != "0.weight")


@pytest.mark.parametrize("world", [2, 4])
def test_ranges_of_a_sharded_optimizer_get_their_part_of_the_factors(ranks, world):
    expected, _ = train(torch.float64)
    for params, _ in ranks(world, train, torch.float64, world):
        for name, param in params.items():
            torch.testing.assert_close(param, expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("masters", ["full", "remainder"])
def test_the_master_of_a_bf16_parameter_is_what_is_scaled(masters):
    _, plain = train(torch.bfloat16, rescales=False, masters=masters)
    params, scaled = train(torch.bfloat16, masters=masters)
    expected = plain["0.weight"] * factors()["0.weight"].float()
    torch.testing.assert_close(scaled["0.weight"], expected, rtol=1e-6, atol=1e-9)
    assert torch.equal(params["0.weight"], scaled["0.weight"].bfloat16())


def test_a_skipped_step_scales_nothing():
    with ParallelState(ParallelLayout()) as state:
        model = make_model(torch.float32)
        optimizer = build_optimizer(model, OptimizerConfig(lr=0.1, skip_above=1e-9), state)
        optimizer.rescale = lambda: pytest.fail("it was asked for factors")
        before = model[0].weight.detach().clone()
        model(torch.ones(2, 6)).sum().backward()
        assert not optimizer.step().stepped
        assert torch.equal(model[0].weight, before)
