"""A bias, dropout and a residual against torch's, eager and compiled.

    python packages/mt-fusions/benchmarks/bias_dropout_add.py [inductor]

Prints the times of the others over ours (above 1 ours is faster) and the share of a copy of
the bytes that have to move: x, the residual and the result forward; backward the gradients of the
result and of x. torch's dropout draws from a generator, ours from a key and a counter.
"""

import sys

import torch
import torch.nn.functional as F
from mt_fusions import bias_dropout_add
from timing import eager_and_inductor, forward_of, report, step_of
from torch import Tensor

ROWS, WIDTH = 4096, 1024


def main() -> None:
    inductor = "inductor" in sys.argv
    first = torch.arange(ROWS) * WIDTH
    for dtype in (torch.float32, torch.bfloat16):
        x, residual, grad = torch.randn(3, ROWS, WIDTH).to(dtype)
        args = x, torch.randn(WIDTH).to(dtype), residual
        for probability in (0.0, 0.1):

            def ours(x: Tensor, bias: Tensor, residual: Tensor, p: float = probability) -> Tensor:
                return bias_dropout_add(x, bias, residual, p, key=7, first=first)

            def plain(x: Tensor, bias: Tensor, residual: Tensor, p: float = probability) -> Tensor:
                return residual + F.dropout(x + bias, p)

            if not probability:
                torch.testing.assert_close(ours(*args), plain(*args), rtol=2e-2, atol=5e-2)
            functions = {"ours": ours, **eager_and_inductor(plain, inductor=inductor)}
            name = f"bias_dropout_add {probability} {dtype}"
            forward = {key: forward_of(f, *args) for key, f in functions.items()}
            report(f"{name} forward", forward, 3 * x.nbytes)
            step = {key: step_of(f, grad, *args) for key, f in functions.items()}
            report(f"{name} with backward", step, 5 * x.nbytes)


if __name__ == "__main__":
    main()
