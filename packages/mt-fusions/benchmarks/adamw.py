"""AdamW of many tensors against torch's foreach and fused kernels.

    python packages/mt-fusions/benchmarks/adamw.py

Prints the times of the others over ours (above 1 ours is faster) and the share of a copy of
the bytes that have to move: masters, gradients and two moments, of which all but one are written.
"""

import torch
from mt_fusions import AdamWOptions, AdamWState, adamw_
from timing import report

SHAPES = [(1024, 1024)] * 3 + [(1024,)] * 20


def main() -> None:
    lists = [[torch.rand(shape) for shape in SHAPES] for _ in range(4)]
    lists[1] = [g / 1000 for g in lists[1]]
    ways = {}
    for name, how in {"foreach": {"foreach": True}, "fused": {"fused": True}}.items():
        leaves = [w.clone().requires_grad_() for w in lists[0]]
        for w, g in zip(leaves, lists[1], strict=True):
            w.grad = g.clone()
        ways[name] = torch.optim.AdamW(leaves, lr=1e-3, **how).step
    state, options = AdamWState(*lists), AdamWOptions(step=5, lr=1e-3, weight_decay=0.01)
    moved = 7 * sum(w.nbytes for w in lists[0])
    report("adamw_ torch.float32", {"ours": lambda: adamw_(state, options), **ways}, moved)


if __name__ == "__main__":
    main()
