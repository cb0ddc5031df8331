"""RMSNorm against torch's, eager and compiled.

    python packages/mt-fusions/benchmarks/rms_norm.py [inductor]

Prints the times of the others over ours (above 1 ours is faster) and the share of a copy of
the bytes that have to move: x and y forward, and x, its gradient and that of y backward.
"""

import sys

import torch
import torch.nn.functional as F
from mt_fusions import rms_norm
from timing import eager_and_inductor, forward_of, report, step_of

ROWS, WIDTH = 4096, 1024


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def main() -> None:
    inductor = "inductor" in sys.argv
    for dtype in (torch.float32, torch.bfloat16):
        x, grad = torch.randn(2, ROWS, WIDTH).to(dtype)
        weight = torch.rand(WIDTH).to(dtype)
        others = eager_and_inductor(plain_rms_norm, inductor=inductor)

        def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return rms_norm(x, weight, 1e-5)

        torch.testing.assert_close(ours(x, weight), plain_rms_norm(x, weight))
        functions = {"ours": ours, **others}
        forward = {name: forward_of(f, x, weight) for name, f in functions.items()}
        report(f"rms_norm {dtype} forward", forward, 2 * x.nbytes)
        step = {name: step_of(f, grad, x, weight) for name, f in functions.items()}
        report(f"rms_norm {dtype} with backward", step, 5 * x.nbytes)


if __name__ == "__main__":
    main()
