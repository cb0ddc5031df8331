"""AdamW's step, and what comes before it, against torch's fused AdamW and its clipping.

    python packages/mt-optim/benchmarks/adamw.py [--width 256 --layers 8] [--out FILE]

Both sides have equal parameters, 49M of them, which no cache holds, and take
turns. Prints ours over theirs within rounds, below 1 is faster: the median and the middle half, of
the clock and of the processors' time.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from mt_optim import AdamW, OptimizerConfig, build_optimizer, clip_grad_norm
from mt_parallel_state import ParallelLayout, ParallelState
from mt_testing import environment, ratios, shown, take_turns, write_report
from torch import nn

Way = Callable[[], object]


def make_params(options: argparse.Namespace) -> list[nn.Parameter]:
    """Return a table, and layers of four matrices and two vectors, with gradients."""
    torch.manual_seed(0)
    width = options.width
    layer = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    shapes = [(32 * width, width)] + [*layer, (width,), (width,)] * options.layers
    params = [nn.Parameter(torch.randn(shape, device=options.device)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def pairs(options: argparse.Namespace) -> dict[str, tuple[Way, Way]]:
    """Return the compared optimizers by name, ours and torch's."""
    ours, theirs, guarded = (make_params(options) for _ in range(3))
    named = [(str(number), param) for number, param in enumerate(ours)]
    state = ParallelState(ParallelLayout())
    adamw = AdamW(ours, lr=1e-3, betas=(0.9, 0.95))
    fused = torch.optim.AdamW(theirs, lr=1e-3, betas=(0.9, 0.95), fused=True)
    config = OptimizerConfig(lr=1e-3, betas=(0.9, 0.95), max_norm=1e9)
    whole = build_optimizer(
        [(n, p) for (n, _), p in zip(named, guarded, strict=True)], config, state
    )

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_(theirs, 1e9).item()
        fused.step()

    return {
        "step": (adamw.step, fused.step),
        "norm, decision and step": (whole.step, clip_and_step),
        "norm": (
            lambda: clip_grad_norm(named, state, math.inf),
            lambda: nn.utils.get_total_norm([param.grad for param in theirs]).item(),
        ),
        "clip": (
            lambda: clip_grad_norm(named, state, 1e-3),
            lambda: nn.utils.clip_grad_norm_(theirs, 1e-3).item(),
        ),
    }


def main() -> None:
    """Run the comparison, print it and write what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--seconds", type=float, default=12, help="of each comparison, at most")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    count = sum(param.numel() for param in make_params(options))
    sizes = {"parameters": count, "dtype": "fp32", "threads": options.threads}
    print(f"torch {torch.__version__}, {sizes}, {options.device}: ours / torch's fused AdamW")
    results = {}
    wait = torch.cuda.synchronize if options.device == "cuda" else None
    for name, (ours, theirs) in pairs(options).items():
        ways = {"ours": ours, "theirs": theirs}
        rounds = take_turns(ways, options.rounds, seconds=options.seconds, wait=wait)
        found = ratios(rounds, "ours", "theirs")
        results[name] = {"rounds": len(rounds), "time_ratios": found}
        times = ", ".join(f"{clock} {shown(spread)}" for clock, spread in found.items())
        print(f"  {name:24} {times}", flush=True)
    write_report(options.out, {**environment("torch"), **sizes, "results": results})


if __name__ == "__main__":
    main()
