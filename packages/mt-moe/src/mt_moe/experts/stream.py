"""Experts one after the other, each through its whole feed-forward while its rows are in cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from mt_parallel_state import GradSink
from mt_tensor_parallel import TorchGemm
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, kw_only=True)
class StreamContext:
    """The settings of one call of `stream`.

    Attributes:
        hidden: The activation, from the first product [n, wide] to the second's input [n, ffn].
        sinks: Buffers that sum the gradients of the two weights; None leaves one to autograd.
        needs_backward: Keep first products for backward.
    """

    hidden: Callable[[Tensor], Tensor]
    sinks: tuple[GradSink | None, GradSink | None]
    needs_backward: bool


def stream(
    rows: Tensor, up: Tensor, down: Tensor, counts: Tensor, context: StreamContext
) -> Tensor:
    """Apply each expert to its rows: `hidden(x @ up[e].T) @ down[e].T`, by torch's products.

    No other tensor is as long as all rows but the result and the first products, which backward
    needs to recompute `hidden`. The host waits for the counts. Rows after the last
    expert's give zeros.

    Shape:
        rows: [N, H], sorted by expert; up: [E, wide, H]; down: [E, H, ffn]; counts: [E].
        Returns [N, H].
    """
    return cast("Tensor", _Stream.apply(rows, up, down, counts, context))


class _WeightGrad:
    """The gradient of a weight, written expert by expert into a new tensor or a sink."""

    def __init__(self, weight: Tensor, sink: GradSink | None, served: Sequence[int]) -> None:
        self.sink, self.accumulate = sink, False
        if sink is None:
            self.out = torch.empty_like(weight)
        else:
            out, self.accumulate = sink.begin()
            self.out = out.flatten(1, -2)
        idle = sorted(set(range(len(weight))) - set(served))
        if idle and not self.accumulate:
            self.out[idle] = 0

    def add(self, expert: int, grad: Tensor, x: Tensor) -> None:
        """Write the gradient of an expert with rows."""
        TorchGemm().wgrad_into(grad, x, self.out[expert], accumulate=self.accumulate)

    def end(self) -> Tensor | None:
        """Return the gradient, or None if it went to the sink."""
        if self.sink is None:
            return self.out
        self.sink.end()
        return None


class _Stream(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, up: Tensor, down: Tensor, counts: Tensor, context: StreamContext
    ) -> Tensor:
        sizes: list[int] = counts.tolist()
        y, kept = rows.new_empty(len(rows), down.shape[1]), list[Tensor]()
        for expert, own in _served(sizes):
            wide = rows[own] @ up[expert].t()
            torch.mm(context.hidden(wide), down[expert].t(), out=y[own])
            if context.needs_backward:
                kept.append(wide)
        y[sum(sizes) :] = 0
        ctx.sizes, ctx.context = sizes, context
        ctx.save_for_backward(rows, up, down, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, up, down, *kept = ctx.saved_tensors
        grad, places = grads[0], list(_served(ctx.sizes))
        needs, served = ctx.needs_input_grad, [expert for expert, _ in places]
        grad_x = torch.empty_like(rows) if needs[0] else None
        pairs = zip((up, down), ctx.context.sinks, needs[1:3], strict=True)
        to_up, to_down = (_WeightGrad(w, sink, served) if need else None for w, sink, need in pairs)
        for (expert, own), wide in zip(places, kept, strict=True):
            with torch.enable_grad():  # a small graph of the activation alone
                leaf = wide.detach().requires_grad_()
                hidden = ctx.context.hidden(leaf)
            if to_down is not None:
                to_down.add(expert, grad[own], hidden.detach())
            (grad_wide,) = torch.autograd.grad(hidden, leaf, grad[own] @ down[expert])
            if to_up is not None:
                to_up.add(expert, grad_wide, rows[own])
            if grad_x is not None:
                torch.mm(grad_wide, up[expert], out=grad_x[own])
        if grad_x is not None:
            grad_x[sum(ctx.sizes) :] = 0
        return grad_x, to_up and to_up.end(), to_down and to_down.end(), None, None


def _served(sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield each expert with rows, and the slice of its rows."""
    end = 0
    for expert, size in enumerate(sizes):
        end += size
        if size:
            yield expert, slice(end - size, end)
