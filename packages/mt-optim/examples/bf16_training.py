"""Train a small bf16 model with fp32 masters, clipping and a warm-up, stable, decay schedule.

python packages/mt-optim/examples/bf16_training.py
"""

import math

import torch
from mt_data_parallel import GradBuffer
from mt_optim import AdamW, LRSchedule, clip_grad_norm
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn

STEPS = 60


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).bfloat16()
    named = list(model.named_parameters())
    state = ParallelState(ParallelLayout())  # one rank; a larger layout changes nothing below
    buffer = GradBuffer(named, group=state.group("dp"))  # fp32 gradients for bf16 parameters
    schedule = LRSchedule(kind="wsd", max_lr=3e-3, warmup=10, decay=STEPS, wsd_anneal=20)
    optimizer = AdamW(named, lr=schedule.max_lr)
    x = torch.randn(256, 16)
    target = x.square().mean(1, keepdim=True)
    for step in range(STEPS):
        lr = schedule.at(step + 1)
        buffer.start(1)
        loss = (model(x.bfloat16()).float() - target).square().mean()
        loss.backward()
        buffer.finish()
        norm = clip_grad_norm(named, state, 1.0)
        if math.isfinite(norm):
            optimizer.step(lr=lr)
        if step % 10 == 9:
            print(f"step {step + 1:3}  loss {loss.item():.4f}  norm {norm:.3f}  lr {lr:.2e}")
    name = "0.weight"
    gap = (optimizer.master(name) - model[0].weight).abs().max().item()
    print(f"largest rounding of {name}: {gap:.1e}, kept by its fp32 master")


if __name__ == "__main__":
    main()
