"""Head and loss in blocks against all logits at once: peak memory and time, forward and backward.

Each side's peak is measured in a process of its own, the times alternate in one process.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from mt_tensor_parallel import linear_cross_entropy
from torch import Tensor

TOKENS, HIDDEN, VOCAB = 2048, 256, 32768
ROUNDS = 7


def all_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")


SIDES: dict[str, Callable[..., Tensor]] = {
    "in blocks": linear_cross_entropy,
    "all logits": all_logits,
}


def step(side: Callable[..., Tensor], inputs: list[Tensor], labels: Tensor) -> float:
    started = time.perf_counter()
    side(*inputs, labels).backward()
    for tensor in inputs:
        tensor.grad = None
    return time.perf_counter() - started


def make_inputs() -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    inputs = [torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN) * 0.02]
    return [tensor.requires_grad_() for tensor in inputs], torch.randint(0, VOCAB, (TOKENS,))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Print the ratios."""
    inputs, labels = make_inputs()
    if len(sys.argv) > 1:  # the child of the memory measurement
        before = peak_bytes()
        step(SIDES[sys.argv[1]], inputs, labels)
        print(peak_bytes() - before)
        return
    memory = {
        name: int(subprocess.check_output([sys.executable, __file__, name]))  # noqa: S603
        for name in SIDES
    }
    print(
        f"{TOKENS} tokens, hidden {HIDDEN}, vocabulary {VOCAB}, fp32, {torch.get_num_threads()} "
        f"threads: peak memory {memory['in blocks'] / 2**20:.0f} MiB against "
        f"{memory['all logits'] / 2**20:.0f} MiB, {memory['in blocks'] / memory['all logits']:.2f}x"
    )
    for side in SIDES.values():
        step(side, inputs, labels)
    ratios = []
    for _ in range(ROUNDS):
        seconds = {name: step(side, inputs, labels) for name, side in SIDES.items()}
        ratios.append(seconds["all logits"] / seconds["in blocks"])
    print(
        f"speed against all logits: {statistics.median(ratios):.2f}x "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
