"""Linear cross entropy against torch's linear and cross entropy, eager and compiled.

    python packages/mt-fusions/benchmarks/linear_cross_entropy.py [inductor]

Prints the times of the others over ours (above 1 ours is faster) and the share of a copy of
the bytes that have to move: x and the weight, and backward both and their gradients. The products
take most of the time; ours makes the three of a step in forward, and forward alone has one.
"""

import sys

import torch
import torch.nn.functional as F
from mt_fusions import linear_cross_entropy
from timing import eager_and_inductor, forward_of, report, step_of

ROWS, WIDTH, VOCABULARY = 1024, 256, 32000


def main() -> None:
    inductor = "inductor" in sys.argv
    labels = torch.randint(0, VOCABULARY, (ROWS,))
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(ROWS, WIDTH).to(dtype)
        weight = (torch.randn(VOCABULARY, WIDTH) / WIDTH**0.5).to(dtype)

        def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return linear_cross_entropy(x, weight, labels)

        def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy((x @ weight.t()).float(), labels)

        torch.testing.assert_close(ours(x, weight), plain(x, weight))
        functions = {"ours": ours, **eager_and_inductor(plain, inductor=inductor)}
        name = f"linear_cross_entropy {dtype}"
        moved = x.nbytes + weight.nbytes
        forward = {key: forward_of(f, x, weight) for key, f in functions.items()}
        report(f"{name} forward", forward, moved)
        step = {key: step_of(f, torch.ones(()), x, weight) for key, f in functions.items()}
        report(f"{name} with backward", step, 3 * moved)


if __name__ == "__main__":
    main()
