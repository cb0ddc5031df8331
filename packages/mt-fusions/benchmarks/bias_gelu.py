"""GELU of a sum with a bias against torch's, eager and compiled.

    python packages/mt-fusions/benchmarks/bias_gelu.py [inductor]

Prints the times of the others over ours (above 1 ours is faster) and the share of a copy of
the bytes that have to move: x and y forward; backward x, its gradient and that of y.
"""

import sys

import torch
import torch.nn.functional as F
from mt_fusions import bias_gelu, bias_gelu_tanh
from timing import eager_and_inductor, forward_of, report, step_of

ROWS, WIDTH = 4096, 1024


def plain_erf(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias)


def plain_tanh(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias, approximate="tanh")


def main() -> None:
    inductor = "inductor" in sys.argv
    for dtype in (torch.float32, torch.bfloat16):
        x, grad = torch.randn(2, ROWS, WIDTH).to(dtype)
        bias = torch.randn(WIDTH).to(dtype)
        for ours, plain in ((bias_gelu, plain_erf), (bias_gelu_tanh, plain_tanh)):
            torch.testing.assert_close(ours(x, bias), plain(x, bias), rtol=2e-2, atol=2e-2)
            functions = {"ours": ours, **eager_and_inductor(plain, inductor=inductor)}
            name = f"{ours.__name__} {dtype}"
            forward = {key: forward_of(f, x, bias) for key, f in functions.items()}
            report(f"{name} forward", forward, 2 * x.nbytes)
            step = {key: step_of(f, grad, x, bias) for key, f in functions.items()}
            report(f"{name} with backward", step, 5 * x.nbytes)


if __name__ == "__main__":
    main()
