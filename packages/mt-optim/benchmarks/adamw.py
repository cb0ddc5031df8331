"""AdamW.step against torch.optim.AdamW(fused=True), and clipping against torch's, in one run.

    python packages/mt-optim/benchmarks/adamw.py [cuda] [large]

`large` has 50M parameters, which are no longer in a cache.
Prints ratios of the median times, ours over torch's: below 1 is faster.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
from mt_optim import AdamW, clip_grad_norm
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn

SHAPES = [(4096, 256)] + [(768, 256), (256, 256), (1024, 256), (256, 1024), (256,), (256,)] * 8
LARGE = [(16384, 512)] + [(1536, 512), (512, 512), (2048, 512), (512, 2048), (512,), (512,)] * 13
ROUNDS = 30


def make_params(device: str) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = LARGE if "large" in sys.argv else SHAPES
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def seconds(function: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(ours: Callable[[], object], theirs: Callable[[], object], device: str) -> float:
    """Alternate the two, so that a busy machine disturbs both alike."""
    pairs = [(seconds(ours, device), seconds(theirs, device)) for _ in range(ROUNDS)][3:]
    return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)


def main() -> None:
    device = "cuda" if "cuda" in sys.argv else "cpu"
    params, others = make_params(device), make_params(device)
    named = [(str(i), param) for i, param in enumerate(params)]
    state = ParallelState(ParallelLayout())
    optimizer = AdamW(params, lr=1e-3, betas=(0.9, 0.95))
    reference = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), fused=True)
    count = sum(param.numel() for param in params)
    print(f"{len(params)} tensors, {count / 1e6:.1f}M fp32 parameters on {device}")
    step = compare(optimizer.step, reference.step, device)
    print(f"step / torch.optim.AdamW(fused=True)       {step:.2f}")
    norm = compare(
        lambda: clip_grad_norm(named, state, math.inf),
        lambda: torch.nn.utils.get_total_norm([p.grad for p in others]).item(),
        device,
    )
    print(f"norm / torch.nn.utils.get_total_norm       {norm:.2f}")
    clip = compare(
        lambda: clip_grad_norm(named, state, 1e-3),
        lambda: torch.nn.utils.clip_grad_norm_(others, 1e-3).item(),
        device,
    )
    print(f"clip / torch.nn.utils.clip_grad_norm_      {clip:.2f}")


if __name__ == "__main__":
    main()
