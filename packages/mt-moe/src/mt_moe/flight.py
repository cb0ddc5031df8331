"""Collectives under way, forward and backward, while something else is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from mt_parallel_state import Pending
from torch import Tensor
from torch.autograd.function import once_differentiable

Start = Callable[[Tensor], Pending]


class Flight:
    """A collective that has begun; its adjoint begins and ends in backward in the same way.

    What is computed between this and `wait` runs beside the collective. Autograd goes the
    other way: the adjoint begins with the gradient of the result, what was computed between runs
    backward, and then the adjoint is waited for.

    Args:
        x: What is sent.
        start: Begins the collective.
        start_adjoint: Begins its adjoint, of the result's gradient.
    """

    def __init__(self, x: Tensor, start: Start, start_adjoint: Start) -> None:
        self.start, self.start_adjoint = start, start_adjoint
        self.pending: Pending | None = None
        self._edge = cast("Tensor", _Begin.apply(x, self))

    def wait(self) -> Tensor:
        """Block (the current stream, on CUDA) until the result is there, and return it."""
        return cast("Tensor", _End.apply(self._edge, self))

    def land(self) -> Tensor:
        """Wait for what is under way."""
        if self.pending is None:
            raise RuntimeError("a collective was waited for twice, or has not begun")
        pending, self.pending = self.pending, None
        return pending.wait()


class _Begin(torch.autograd.Function):
    """Gives an empty tensor: the edge along which backward finds its way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.pending = flight.start(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.flight.land(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return flight.land()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.flight.pending = ctx.flight.start_adjoint(grads[0])
        return grads[0].new_empty(0), None
