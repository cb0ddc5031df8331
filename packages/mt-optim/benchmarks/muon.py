"""Muon's step against torch.optim.Muon, the same matrices with the same bits.

    python packages/mt-optim/benchmarks/muon.py [--width 256] [--layers 4] [--out FILE]

Both sides take turns, and have to have equal weights in the end. Prints ours over theirs within
rounds, below 1 is faster: the median and the middle half, of the clock and of the processors' time.
"""

import argparse
from pathlib import Path

import torch
from mt_optim import Muon, Orthogonalization
from mt_testing import environment, ratios, shown, take_turns, write_report
from torch import nn


def make_params(shapes: list[tuple[int, int]], device: str) -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def compare(shapes: list[tuple[int, int]], options: argparse.Namespace) -> dict[str, object]:
    """Return the ratios of steps of some matrices."""
    mine, others = make_params(shapes, options.device), make_params(shapes, options.device)
    how = Orthogonalization(scale="shape_scaling")
    ours, theirs = Muon(mine, lr=1e-3, orthogonalization=how), torch.optim.Muon(others, lr=1e-3)
    ways = {"ours": ours.step, "theirs": theirs.step}
    wait = torch.cuda.synchronize if options.device == "cuda" else None
    rounds = take_turns(ways, options.rounds, seconds=options.seconds, wait=wait)
    for param, other in zip(mine, others, strict=True):
        if not torch.equal(param, other):
            raise SystemExit(f"{tuple(param.shape)}: weights differ; there is nothing to compare")
    return {"rounds": len(rounds), "time_ratios": ratios(rounds, "ours", "theirs")}


def main() -> None:
    """Run the comparison, print it and write what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--seconds", type=float, default=10, help="of each comparison, at most")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    width = options.width
    kinds = {
        "square": [(width, width)],
        "tall": [(3 * width, width), (4 * width, width)],
        "wide": [(width, 4 * width)],
    }
    kinds["all"] = [shape for shapes in kinds.values() for shape in shapes]
    sizes = {"width": width, "layers": options.layers, "threads": options.threads}
    print(f"torch {torch.__version__}, {sizes}, {options.device}: ours / torch.optim.Muon, a step")
    results = {}
    for name, shapes in kinds.items():
        results[name] = found = compare(shapes * options.layers, options)
        times = ", ".join(f"{clock} {shown(s)}" for clock, s in found["time_ratios"].items())
        print(f"  {name:8} {times}", flush=True)
    write_report(options.out, {**environment("torch"), **sizes, "results": results})


if __name__ == "__main__":
    main()
