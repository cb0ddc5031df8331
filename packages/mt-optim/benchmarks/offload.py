"""A step with a share of the states on the host against one without.

    python packages/mt-optim/benchmarks/offload.py [--device cuda] [--out FILE]

Prints for each share the bytes that a step copies, and its time over that of a step without within
rounds: the median and the middle half, of the clock and of the processors' time. On a CPU copies go
from memory to memory, so the ratio shows what they cost and not what overlap saves.
"""

import argparse
from pathlib import Path

import torch
from mt_optim import NamedOptimizer, OptimizerConfig, build_optimizer
from mt_parallel_state import ParallelLayout, ParallelState
from mt_testing import environment, ratios, shown, take_turns, write_report
from torch import nn

SHARES = (0.0, 0.25, 0.5, 1.0)


def make_optimizer(share: float, dtype: torch.dtype, options: argparse.Namespace) -> NamedOptimizer:
    torch.manual_seed(0)
    width = options.width
    layer = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    shapes = [(16 * width, width)] + [*layer, (width,), (width,)] * options.layers
    params = [nn.Parameter(torch.randn(s, device=options.device, dtype=dtype)) for s in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    named = [(str(number), param) for number, param in enumerate(params)]
    config = OptimizerConfig(lr=1e-3, offload=share)
    optimizer = build_optimizer(named, config, ParallelState(ParallelLayout()))
    optimizer.guard = None  # the norm is the same for all
    return optimizer


def compare(dtype: torch.dtype, options: argparse.Namespace) -> dict[str, object]:
    """Print and return what each share costs."""
    optimizers = {str(share): make_optimizer(share, dtype, options) for share in SHARES}
    ways = {share: each.step for share, each in optimizers.items()}
    wait = torch.cuda.synchronize if options.device == "cuda" else None
    rounds = take_turns(ways, options.rounds, seconds=options.seconds, wait=wait)
    found: dict[str, object] = {}
    for share, optimizer in optimizers.items():
        traffic, spread = optimizer.offload_traffic, ratios(rounds, share, str(SHARES[0]))
        copied = {"to_host": traffic.to_host, "to_device": traffic.to_device}
        found[share] = {**copied, "time_ratios": spread}
        times = ", ".join(f"{clock} {shown(each)}" for clock, each in spread.items())
        moved = f"{traffic.to_host / 1e6:6.1f}MB {traffic.to_device / 1e6:6.1f}MB"
        print(f"{str(dtype).removeprefix('torch.'):8} {share:>7} {moved}   {times}", flush=True)
    return {"rounds": len(rounds), "shares": found}


def main() -> None:
    """Run the comparison, print it and write what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=20, help="of each dtype, at most")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = {"width": options.width, "layers": options.layers, "threads": options.threads}
    print(f"torch {torch.__version__}, {sizes}, {options.device}")
    print("weights    share  to host to device  step / step without")
    dtypes = (torch.float32, torch.bfloat16)
    results = {str(dtype).removeprefix("torch."): compare(dtype, options) for dtype in dtypes}
    write_report(options.out, {**environment("torch"), **sizes, "results": results})


if __name__ == "__main__":
    main()
