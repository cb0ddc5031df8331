"""Softmax of attention scores against torch's, eager and compiled.

    python packages/mt-fusions/benchmarks/masked_softmax.py [inductor]

Prints the times of the others over ours (above 1 ours is faster) and the share of a copy of
the bytes that have to move: scores and probabilities forward; backward these and two gradients.
"""

import sys

import torch
from mt_fusions import masked_softmax
from timing import eager_and_inductor, forward_of, report, step_of

HEADS, TOKENS, SCALE = 16, 512, 0.125


def ours(scores: torch.Tensor) -> torch.Tensor:
    return masked_softmax(scores, scale=SCALE, causal=True)


def plain(scores: torch.Tensor) -> torch.Tensor:
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return torch.softmax((scores * SCALE).masked_fill(hidden, float("-inf")), -1)


def main() -> None:
    functions = {"ours": ours, **eager_and_inductor(plain, inductor="inductor" in sys.argv)}
    for dtype in (torch.float32, torch.bfloat16):
        scores, grad = torch.randn(2, 1, HEADS, TOKENS, TOKENS).to(dtype)
        torch.testing.assert_close(ours(scores), plain(scores))
        forward = {name: forward_of(f, scores) for name, f in functions.items()}
        report(f"masked_softmax {dtype} forward", forward, 2 * scores.nbytes)
        step = {name: step_of(f, grad, scores) for name, f in functions.items()}
        report(f"masked_softmax {dtype} with backward", step, 5 * scores.nbytes)


if __name__ == "__main__":
    main()
