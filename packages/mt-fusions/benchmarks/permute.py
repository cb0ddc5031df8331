"""Tokens to their experts and back against plain torch, eager and compiled.

    python packages/mt-fusions/benchmarks/permute.py [inductor]

Prints the times of the others over ours (above 1 ours is faster) and the share of a copy of
the bytes that have to move: k rows per token out and k back, and one read and one written.
"""

import sys

import torch
from mt_fusions import permute, unpermute
from timing import eager_and_inductor, forward_of, report, step_of
from torch import Tensor

TOKENS, WIDTH, CHOICES, EXPERTS = 2048, 1024, 4, 32


def main() -> None:
    experts = torch.rand(TOKENS, EXPERTS).topk(CHOICES, -1).indices

    def ours(x: Tensor, weights: Tensor) -> Tensor:
        sent = permute(x, experts, EXPERTS)
        return unpermute(sent.rows, sent.places, weights)

    def plain(x: Tensor, weights: Tensor) -> Tensor:
        order = experts.flatten().argsort(stable=True)
        token = order // CHOICES
        rows = x[token]
        weighted = rows * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, weighted)

    functions = {"ours": ours, **eager_and_inductor(plain, inductor="inductor" in sys.argv)}
    for dtype in (torch.float32, torch.bfloat16):
        x, grad = torch.randn(2, TOKENS, WIDTH).to(dtype)
        weights = torch.rand(TOKENS, CHOICES).to(dtype)
        torch.testing.assert_close(ours(x, weights), plain(x, weights), rtol=3e-2, atol=3e-2)
        forward = {name: forward_of(f, x, weights) for name, f in functions.items()}
        report(f"permute {dtype} forward", forward, (2 * CHOICES + 2) * x.nbytes)
        step = {name: step_of(f, grad, x, weights) for name, f in functions.items()}
        report(f"permute {dtype} with backward", step, (5 * CHOICES + 4) * x.nbytes)


if __name__ == "__main__":
    main()
