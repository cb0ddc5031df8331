"""The optimizer, the clip and the gradient buffer together, over data-parallel ranks."""

import pytest
import torch
from mt_data_parallel import GradBuffer
from mt_optim import AdamW, LRSchedule, clip_grad_norm, default_decay_filter
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn

ROWS, STEPS, MAX_NORM = 8, 4, 0.05
SCHEDULE = LRSchedule(kind="linear", max_lr=0.02, warmup=2, decay=STEPS)


def make_model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def batch(step, dtype):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 6, generator=generator).to(dtype)


def train(dtype, microbatches=1):
    """Train on this rank's rows; the loss is the mean over the global batch."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    with ParallelState(ParallelLayout(dp=world)) as state:
        model = make_model(dtype)
        named = list(model.named_parameters())
        buffer = GradBuffer(named, group=state.group("dp"), bucket_size=40)
        optimizer = AdamW(
            named,
            lr=SCHEDULE.max_lr,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            decay_filter=default_decay_filter,
        )
        norms = []
        for step in range(STEPS):
            rows = batch(step, dtype).chunk(world)[state.rank]
            buffer.start(microbatches)
            for part in rows.chunk(microbatches):
                (model(part).square().sum() / ROWS).backward()
            buffer.finish()
            norms.append(clip_grad_norm(named, state, MAX_NORM))
            optimizer.step(lr=SCHEDULE.at(step + 1))
        params = {name: param.detach().clone() for name, param in named}
    return params, norms


def reference(dtype):
    """The same run with nothing of ours in the loop but the learning rates."""
    model = make_model(dtype)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(batch(step, dtype)).square().sum() / ROWS).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULE.at(step + 1)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


@pytest.mark.parametrize(("world_size", "microbatches"), [(2, 1), (2, 2), (4, 1)])
def test_data_parallel_training_equals_torch_on_one_rank(ranks, world_size, microbatches):
    expected, norms = reference(torch.float64)
    results = ranks(world_size, train, torch.float64, microbatches)
    for params, seen in results:
        assert seen == pytest.approx(norms, rel=1e-12)
        for name, param in params.items():
            torch.testing.assert_close(param, expected[name], rtol=1e-11, atol=1e-14)
            assert torch.equal(param, results[0][0][name])


def test_one_rank_training_equals_torch():
    expected, norms = reference(torch.float64)
    params, seen = train(torch.float64)
    assert min(norms) > MAX_NORM
    assert seen == pytest.approx(norms, rel=1e-12)
    for name, param in params.items():
        torch.testing.assert_close(param, expected[name], rtol=1e-12, atol=1e-14)


def test_bf16_replicas_stay_bit_equal(ranks):
    results = ranks(4, train, torch.bfloat16)
    for params, norms in results:
        assert norms == results[0][1]
        assert all(torch.equal(param, results[0][0][name]) for name, param in params.items())
