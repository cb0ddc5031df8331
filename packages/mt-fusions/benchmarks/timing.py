"""Alternating rounds of several ways to do one thing, as ratios of processor time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

ROUNDS = 25


def eager_and_inductor(
    function: Callable[..., Tensor], *, inductor: bool
) -> dict[str, Callable[..., Tensor]]:
    """The plain function, and compiled where that is wanted: it takes minutes and a compiler."""
    found = {"eager": function}
    return found | ({"inductor": torch.compile(function)} if inductor else {})


def forward_of(function: Callable[..., Tensor], *args: object) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return function(*args)

    return run


def step_of(function: Callable[..., Tensor], grad: Tensor, *args: object) -> Callable[[], object]:
    """Forward and backward."""
    leaves = [x.detach().requires_grad_() if _trains(x) else x for x in args]
    wanted = [x for x in leaves if _trains(x)]

    def run() -> object:
        return torch.autograd.grad(function(*leaves), wanted, grad)

    return run


def _trains(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def seconds(ways: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Processor seconds of each way in each round; all ways run once a round."""
    torch.set_num_threads(1)
    for way in ways.values():
        for _ in range(3):
            way()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            start = time.thread_time()
            way()
            found[name].append(time.thread_time() - start)
    return found


def report(title: str, ways: Mapping[str, Callable[[], object]], copied: int) -> None:
    """Print each method's time over ours, and our share of the speed of a copy of equal size."""
    source = torch.randn(1 << 22)
    target = torch.empty_like(source)
    found = seconds({"copy": lambda: target.copy_(source), **ways})
    ours = statistics.median(found["ours"])
    ratios = {
        name: statistics.median(b / a for a, b in zip(found["ours"], times, strict=True))
        for name, times in found.items()
        if name not in ("copy", "ours")
    }
    listed = "  ".join(f"{name}/ours {ratio:.2f}" for name, ratio in ratios.items())
    per_byte = statistics.median(found["copy"]) / (2 * source.nbytes)
    share = copied * per_byte / ours
    print(f"{title:34s} {ours * 1e3:7.2f} ms  {share:4.0%} of a copy  {listed}")
