"""Collectives in flight, in forward and in backward, beside other computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from mt_parallel_state import Group, Pending
from torch import Tensor
from torch.autograd.function import once_differentiable

Start = Callable[[Tensor, dist.ProcessGroup], Pending]


class InFlight(NamedTuple):
    """Rows on their way to other ranks.

    Gradients come back through the tensors in it, so one graph may hand it to another.

    Attributes:
        edge: An empty tensor that leads backward to the start; without a group, the rows.
        wait: Waits for the rows that arrive and returns them, given the edge.
        handle: Everything else that the receiver needs.
    """

    edge: Tensor
    wait: Callable[[Tensor], Tensor]
    handle: Any

    def rows(self) -> Tensor:
        """Wait for the rows that arrive, and return them."""
        return self.wait(self.edge)


def arrived(rows: Tensor, handle: Any) -> InFlight:
    """Wrap rows that need not travel, or have arrived already."""
    return InFlight(rows, _identity, handle)


def launch(rows: Tensor, group: Group, start: Start, adjoint: Start, handle: Any) -> InFlight:
    """Start a collective over a group; with a single rank the rows have arrived already.

    Args:
        rows: The rows to send.
        group: The ranks of the collective.
        start: Starts the collective.
        adjoint: Starts its adjoint, given the gradient of the result.
        handle: Everything else that the receiver needs.
    """
    if group is None or group.size() == 1:
        return arrived(rows, handle)
    collective = _Collective(lambda x: start(x, group), lambda grad: adjoint(grad, group))
    return InFlight(cast("Tensor", _Start.apply(rows, collective)), collective.wait, handle)


def _identity(x: Tensor) -> Tensor:
    return x


class _Collective:
    """A started collective, and its adjoint.

    Work between start and wait overlaps with the collective. Backward runs in the opposite order:
    `_Wait.backward` starts the adjoint, the backward of the work in between overlaps with it, and
    `_Start.backward` waits for it.
    """

    def __init__(
        self, start: Callable[[Tensor], Pending], adjoint: Callable[[Tensor], Pending]
    ) -> None:
        self.start, self.adjoint = start, adjoint
        self.pending: Pending | None = None

    def wait(self, edge: Tensor) -> Tensor:
        """Block (on CUDA, the current stream) until the result is there, and return it."""
        return cast("Tensor", _Wait.apply(edge, self))

    def finish(self) -> Tensor:
        """Wait for the pending collective, and return its result."""
        if self.pending is None:
            raise RuntimeError("a collective was waited for twice, or was never started")
        pending, self.pending = self.pending, None
        return pending.wait()


class _Start(torch.autograd.Function):
    """Start the collective; return an empty tensor, the edge of the graph from start to wait."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: _Collective) -> Tensor:
        ctx.collective = collective
        collective.pending = collective.start(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.collective.finish(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, collective: _Collective) -> Tensor:
        ctx.collective = collective
        return collective.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.collective.pending = ctx.collective.adjoint(grads[0])
        return grads[0].new_empty(0), None  # an edge has no values, so neither has its gradient
