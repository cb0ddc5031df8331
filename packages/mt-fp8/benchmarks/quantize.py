"""Quantising a matrix against copying it, by recipe.

    python packages/mt-fp8/benchmarks/quantize.py [--device cuda --rows 16384] [--out FILE]

A copy reads and writes the matrix once; what quantises has to read it (twice where scales are of
the whole tensor) and to write codes and scales. Prints time over that of a copy within rounds, the
median and the middle half, and the share of the copy's bytes a second.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mt_fp8 import quantize, recipe
from mt_testing import environment, ratios, shown, take_turns, write_report
from torch import Tensor

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")


def ways(x: Tensor, kernel: str) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the timed functions by name, with the bytes that each reads and writes."""
    copy, made = torch.empty_like(x), {}
    made["copy"] = (partial(copy.copy_, x), 2 * x.nbytes)
    for name in RECIPES:
        # Of a weight: its rounding is to the nearest, as the input's.
        how = recipe(name).weight if name == "nvfp4" else recipe(name).input
        reads = 2 if how.is_whole else 1
        call = partial(quantize, x, how, kernel=kernel)
        made[name] = (call, reads * x.nbytes + call().nbytes)
    return made


def main() -> None:
    """Run the comparison, print it and write what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--kernel", default="auto", help="cpu, triton or reference")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    x = torch.randn(options.rows, options.columns, device=options.device).to(torch.bfloat16)
    found = ways(x, options.kernel)
    wait = torch.cuda.synchronize if options.device == "cuda" else None
    calls = {name: call for name, (call, _) in found.items()}
    rounds = take_turns(calls, options.rounds, seconds=options.seconds, wait=wait)
    sizes: dict[str, Any] = {"rows": options.rows, "columns": options.columns, "dtype": "bf16"}
    sizes |= {"device": options.device, "kernel": options.kernel, "threads": options.threads}
    print(f"torch {torch.__version__}, {sizes}: time over a copy's, share of its bytes a second")
    results: dict[str, Any] = {}
    for name, (_, moved) in list(found.items())[1:]:
        spread = ratios(rounds, name, "copy")
        share = moved / found["copy"][1] / spread["wall"][1]
        results[name] = {"time_ratios": spread, "share_of_bandwidth": share}
        print(f"  {name:22} {shown(spread['wall'])}, {share:.1%}", flush=True)
    report = environment("torch") | sizes | {"rounds": len(rounds), "results": results}
    write_report(options.out, report)


if __name__ == "__main__":
    main()
