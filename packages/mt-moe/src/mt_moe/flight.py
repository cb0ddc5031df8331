"""Collectives under way, forward and backward, while something else is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from mt_parallel_state import Group, Pending
from torch import Tensor
from torch.autograd.function import once_differentiable

Start = Callable[[Tensor, dist.ProcessGroup], Pending]


class Travelling(NamedTuple):
    """Rows on their way to other ranks: what is handed to the function that waits for them.

    Gradients come back through the tensors in it, so it may be handed on between two graphs.

    Attributes:
        edge: Leads backward; without a group, the rows.
        land: Waits, given the edge, and returns what arrived.
        way: What else is needed there.
    """

    edge: Tensor
    land: Callable[[Tensor], Tensor]
    way: Any


def at_once(rows: Tensor, way: Any) -> Travelling:
    """Return rows that are there already."""
    return Travelling(rows, _as_it_is, way)


def depart(rows: Tensor, group: Group, start: Start, adjoint: Start, way: Any) -> Travelling:
    """Begin a collective over a group, if it has more than one rank.

    Args:
        rows: What is sent.
        group: Its ranks.
        start: Begins the collective.
        adjoint: Begins its adjoint, of the result's gradient.
        way: What the result is to be understood with.
    """
    if group is None or group.size() == 1:
        return at_once(rows, way)
    flight = _Flight(lambda x: start(x, group), lambda grad: adjoint(grad, group))
    return Travelling(cast("Tensor", _Begin.apply(rows, flight)), flight.wait, way)


def _as_it_is(x: Tensor) -> Tensor:
    return x


class _Flight:
    """A collective that has begun; its adjoint begins and ends in backward in the same way.

    What is computed before `wait` runs beside the collective. Autograd goes the other way: the
    adjoint begins with the gradient of the result, what was computed between runs backward, and
    then the adjoint is waited for.
    """

    def __init__(
        self, start: Callable[[Tensor], Pending], adjoint: Callable[[Tensor], Pending]
    ) -> None:
        self.start, self.adjoint = start, adjoint
        self.pending: Pending | None = None

    def wait(self, edge: Tensor) -> Tensor:
        """Block (the current stream, on CUDA) until the result is there, and return it."""
        return cast("Tensor", _End.apply(edge, self))

    def land(self) -> Tensor:
        """Wait for what is under way."""
        if self.pending is None:
            raise RuntimeError("a collective was waited for twice, or has not begun")
        pending, self.pending = self.pending, None
        return pending.wait()


class _Begin(torch.autograd.Function):
    """Gives an empty tensor: the edge along which backward finds its way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.pending = flight.start(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.flight.land(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.land()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.flight.pending = ctx.flight.adjoint(grads[0])
        return grads[0].new_empty(0), None
