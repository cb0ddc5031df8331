"""LayerNorm against torch's, eager and compiled.

    python packages/mt-fusions/benchmarks/layer_norm.py [inductor]

Prints the times of the others over ours (above 1 ours is faster) and the share of a copy of
the bytes that have to move: x and y forward, and x, its gradient and that of y backward.
"""

import sys

import torch
import torch.nn.functional as F
from mt_fusions import layer_norm
from timing import eager_and_inductor, forward_of, report, step_of

ROWS, WIDTH = 4096, 1024


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return layer_norm(x, weight, bias, 1e-5)


def main() -> None:
    functions = {"ours": ours, **eager_and_inductor(plain, inductor="inductor" in sys.argv)}
    for dtype in (torch.float32, torch.bfloat16):
        x, grad = torch.randn(2, ROWS, WIDTH).to(dtype)
        args = x, *torch.rand(2, WIDTH).to(dtype)
        torch.testing.assert_close(ours(*args), plain(*args))
        forward = {name: forward_of(f, *args) for name, f in functions.items()}
        report(f"layer_norm {dtype} forward", forward, 2 * x.nbytes)
        step = {name: step_of(f, grad, *args) for name, f in functions.items()}
        report(f"layer_norm {dtype} with backward", step, 5 * x.nbytes)


if __name__ == "__main__":
    main()
