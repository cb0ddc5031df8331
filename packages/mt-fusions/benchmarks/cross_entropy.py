"""Cross entropy against torch's, eager and compiled.

    python packages/mt-fusions/benchmarks/cross_entropy.py [inductor]

Prints the times of the others over ours (above 1 ours is faster) and the share of a copy of
the bytes that have to move: the logits forward; backward the logits and their gradient.
"""

import sys

import torch
import torch.nn.functional as F
from mt_fusions import cross_entropy
from timing import eager_and_inductor, report, step_of

ROWS, VOCABULARY = 512, 32000


def main() -> None:
    inductor = "inductor" in sys.argv
    labels = torch.randint(0, VOCABULARY, (ROWS,))
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(ROWS, VOCABULARY).to(dtype)

        def ours(x: torch.Tensor) -> torch.Tensor:
            return cross_entropy(x, labels)

        def plain(x: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(x.float(), labels)

        torch.testing.assert_close(ours(logits), plain(logits))
        functions = {"ours": ours, **eager_and_inductor(plain, inductor=inductor)}
        step = {name: step_of(f, torch.ones(()), logits) for name, f in functions.items()}
        report(f"cross_entropy {dtype} with backward", step, 3 * logits.nbytes)


if __name__ == "__main__":
    main()
