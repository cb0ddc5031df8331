"""Muon.step against torch.optim.Muon on the same matrices, in one run.

    python packages/mt-optim/benchmarks/muon.py [cuda]

Prints the ratio of the median times, ours over torch's (below 1 is faster), and the quartiles of
the ratios of neighbouring pairs.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from mt_optim import Muon, Orthogonalization
from torch import nn

SHAPES = [(768, 256), (256, 256), (1024, 256), (256, 1024)] * 4
ROUNDS = 30


def make_params(device: str) -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def seconds(function: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    device = "cuda" if "cuda" in sys.argv else "cpu"
    how = Orthogonalization(scale="shape_scaling")
    ours = Muon(make_params(device), lr=1e-3, orthogonalization=how)
    theirs = torch.optim.Muon(make_params(device), lr=1e-3)
    pairs = [(seconds(ours.step, device), seconds(theirs.step, device)) for _ in range(ROUNDS)][5:]
    ratio = statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)
    low, _, high = statistics.quantiles([a / b for a, b in pairs])
    print(f"{len(SHAPES)} matrices on {device}: Muon / torch.optim.Muon")
    print(f"step {ratio:.2f} (quartiles {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
