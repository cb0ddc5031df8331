"""Rates as tensors, and a step of AdamW in a CUDA graph."""

import pytest
import torch
from mt_optim import EMA, AdamW, Lion, LRSchedule, default_decay_filter
from torch import nn

SCHEDULE = LRSchedule(max_lr=0.02, warmup=3, decay=10)


def make_model(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
    return model.to(device=device, dtype=dtype)


def set_grads(model, step):
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator).to(param)
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.copy_(grad)


def make(model, lr):
    optimizer = AdamW(model.named_parameters(), lr=lr, decay_filter=default_decay_filter)
    optimizer.ema = EMA(optimizer, 0.9)
    return optimizer


def run(model, optimizer, steps):
    for step in steps:
        set_grads(model, step)
        optimizer.step(lr=SCHEDULE.at(step + 1))


def test_a_rate_in_a_tensor_is_filled_and_gives_the_same_bits():
    ours, theirs = make_model(), make_model()
    first, second = make(ours, torch.tensor(0.0)), make(theirs, 0.0)
    held = [group["lr"] for group in first.param_groups]
    run(ours, first, range(6))
    run(theirs, second, range(6))
    assert all(group["lr"] is lr for group, lr in zip(first.param_groups, held, strict=True))
    assert float(held[0]) == pytest.approx(SCHEDULE.at(6))
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-8)


def test_a_rule_that_takes_numbers_only_says_so():
    with pytest.raises(ValueError, match=r"lr is a tensor, and lion takes a number; use lr.item"):
        Lion(make_model().parameters(), lr=torch.tensor(0.1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="lr must be a number, got a tensor of shape"):
        AdamW(make_model().parameters(), lr=torch.ones(2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_step_follows_the_schedule(dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    ours, theirs = make_model("cuda", dtype), make_model("cuda", dtype)
    first, second = (make(model, torch.tensor(0.0, device="cuda")) for model in (ours, theirs))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # as torch asks for before a capture
        run(ours, first, [0])
    torch.cuda.current_stream().wait_stream(side)
    run(theirs, second, range(6))
    set_grads(ours, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.step()
    for step in range(1, 6):
        set_grads(ours, step)
        for group in first.param_groups:
            group["lr"].fill_(SCHEDULE.at(step + 1))
        graph.replay()
    torch.cuda.synchronize()
    assert first.step_count == second.step_count == 6
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, other)
    for name in first.names:
        assert first.ema is not None
        assert second.ema is not None
        assert torch.equal(first.ema.value(name), second.ema.value(name))
