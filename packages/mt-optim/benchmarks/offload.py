"""A step with a share of the states on the host against one without, in one run.

    python packages/mt-optim/benchmarks/offload.py [cuda]

Prints for each share the bytes that a step copies, and the ratio of the median times. On a CPU the
copies go from memory to memory, so the ratio shows what they cost and not what overlap saves.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from mt_optim import NamedOptimizer, OptimizerConfig, build_optimizer
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn

SHAPES = [(4096, 256)] + [(768, 256), (256, 256), (1024, 256), (256, 1024), (256,), (256,)] * 8
SHARES = (0.0, 0.25, 0.5, 1.0)
ROUNDS = 15


def make_optimizer(share: float, device: str, dtype: torch.dtype) -> NamedOptimizer:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device=device, dtype=dtype)) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    named = [(str(number), param) for number, param in enumerate(params)]
    config = OptimizerConfig(lr=1e-3, offload=share)
    optimizer = build_optimizer(named, config, ParallelState(ParallelLayout()))
    optimizer.guard = None  # the norm is the same for all
    return optimizer


def seconds(step: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    device = "cuda" if "cuda" in sys.argv else "cpu"
    count = sum(torch.Size(shape).numel() for shape in SHAPES)
    print(f"{len(SHAPES)} tensors, {count / 1e6:.1f}M parameters on {device}")
    print("weights  offload  to host  to device  step / step without")
    for dtype in (torch.float32, torch.bfloat16):
        optimizers = [make_optimizer(share, device, dtype) for share in SHARES]
        times = [[seconds(o.step, device) for o in optimizers] for _ in range(ROUNDS)][3:]
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        for share, optimizer, median in zip(SHARES, optimizers, medians, strict=True):
            traffic = optimizer.offload_traffic
            print(
                f"{str(dtype).removeprefix('torch.'):8} {share:7.2f} {traffic.to_host / 1e6:6.1f}MB"
                f" {traffic.to_device / 1e6:8.1f}MB {median / medians[0]:10.2f}"
            )


if __name__ == "__main__":
    main()
