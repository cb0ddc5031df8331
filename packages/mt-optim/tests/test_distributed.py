"""ZeRO-1 equals the replicated optimizer, whatever the rule."""

import math

import pytest
import torch
import torch.distributed as dist
from mt_data_parallel import GradBuffer, Reduction
from mt_optim import (
    SGD,
    AdamW,
    DistributedOptimizer,
    Lion,
    Muon,
    Orthogonalization,
    clip_grad_norm,
    default_decay_filter,
    is_hidden_matrix,
)
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn

STEPS, ROWS = 10, 8


def make_model(dtype, hidden=20):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3)).to(dtype)


def batch(step, dtype):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 6, generator=generator).to(dtype)


def adamw(shards):
    return AdamW(shards, lr=0.02, weight_decay=0.1, decay_filter=default_decay_filter)


def lion(shards):
    return Lion(shards, lr=0.01)


def sgd(shards):
    return SGD(shards, lr=0.05, momentum=0.9)


def muon(shards):
    how = Orthogonalization(dtype=torch.float64, extra_scale=0.2)
    return Muon(shards, lr=0.02, orthogonalization=how)


def train(make, dtype, sharded, overlap=True, bucket_size=100, clip=0.05, hidden=20):
    world = dist.get_world_size() if dist.is_initialized() else 1
    with ParallelState(ParallelLayout(dp=world)) as state:
        model, group = make_model(dtype, hidden), state.group("dp")
        group = Reduction(shards=group) if sharded else Reduction(replicas=group)
        with GradBuffer(
            model.named_parameters(),
            group=group,
            bucket_size=bucket_size,
            overlap=overlap,
            whole=is_hidden_matrix if make is muon else None,
        ) as buffer:
            optimizer = DistributedOptimizer(buffer, make)
            norms = []
            for step in range(STEPS):
                rows = batch(step, dtype).chunk(world)[state.rank]
                buffer.start(1)
                (model(rows).square().sum() / ROWS).backward()
                buffer.finish()
                norms.append(clip_grad_norm(optimizer.shards, state, clip))
                optimizer.step()
            held = sum(
                optimizer.inner.moment(shard.name, key).numel()
                for shard in optimizer.shards
                for key in optimizer.inner.moments(shard.name)
            )
            assert optimizer.step_count == STEPS
            assert optimizer.inner.non_finite() == []
        return {name: p.detach().clone() for name, p in model.named_parameters()}, norms, held


@pytest.mark.parametrize("make", [adamw, lion, sgd, muon], ids=lambda make: make.__name__)
@pytest.mark.parametrize("world_size", [2, 4])
def test_sharded_steps_match_one_rank_to_1e_minus_12(ranks, make, world_size):
    expected, norms, state = train(make, torch.float64, sharded=False)
    results = ranks(world_size, train, make, torch.float64, True)
    for params, seen, _ in results:
        assert seen == pytest.approx(norms, rel=1e-12)
        for name, param in params.items():
            torch.testing.assert_close(param, expected[name], rtol=1e-12, atol=1e-14)
    assert sum(held for _, _, held in results) == state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overlap", [True, False])
def test_sharded_steps_are_bit_equal_to_replicated_ones(ranks, dtype, overlap):
    # Without clipping: the last bit of a norm depends on how its fp32 rows are cut.
    options = (dtype, False, overlap, 100, math.inf)
    expected = ranks(2, train, adamw, *options)[0][0]
    for params, _, _ in ranks(2, train, adamw, dtype, True, *options[2:]):
        assert all(torch.equal(param, expected[name]) for name, param in params.items())


def test_ranks_without_pieces_run_the_same_steps(ranks):
    options = (100, 0.05, 5)  # 30 elements at most, and a rank's part of a bucket has 32
    expected = train(adamw, torch.float64, False, True, *options)[0]
    results = ranks(4, train, adamw, torch.float64, True, True, 1, *options[1:])
    assert [held > 0 for _, _, held in results] == [True, False, False, False]
    for params, _, _ in results:
        for name, param in params.items():
            torch.testing.assert_close(param, expected[name], rtol=1e-12, atol=1e-14)


def test_one_rank_is_the_plain_optimizer():
    plain = train(adamw, torch.float32, sharded=False)
    assert all(
        torch.equal(param, plain[0][name])
        for name, param in train(adamw, torch.float32, sharded=True)[0].items()
    )


def cut_matrices():
    with ParallelState(ParallelLayout(dp=2)) as state:
        group = Reduction(shards=state.group("dp"))
        with GradBuffer(make_model(torch.float32, 64).named_parameters(), group=group) as buffer:
            try:
                DistributedOptimizer(buffer, muon)
            except ValueError as error:
                return str(error)
    return ""


def test_muon_says_that_it_needs_whole_matrices(ranks):
    messages = "".join(ranks(2, cut_matrices))
    assert "Muon needs whole matrices and this is a range of one; give the GradBuffer" in messages


def test_what_is_no_buffer_or_function_is_named():
    with pytest.raises(TypeError, match="buffer must be a GradBuffer"):
        DistributedOptimizer(3, adamw)  # pyright: ignore[reportArgumentType]
    with (
        GradBuffer(make_model(torch.float32).named_parameters(), group=None) as buffer,
        pytest.raises(TypeError, match="make must be a function"),
    ):
        DistributedOptimizer(buffer, 3)  # pyright: ignore[reportArgumentType]


def test_a_step_before_the_gradients_are_reduced_is_told():
    model = make_model(torch.float32)
    with GradBuffer(model.named_parameters(), group=None) as buffer:
        optimizer = DistributedOptimizer(buffer, lambda shards: AdamW(shards, lr=0.1))
        before = [param.detach().clone() for param in model.parameters()]
        buffer.start(1)
        with pytest.raises(RuntimeError, match=r"GradBuffer.finish\(\) was not called"):
            optimizer.step()
        for param, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(param, value)
