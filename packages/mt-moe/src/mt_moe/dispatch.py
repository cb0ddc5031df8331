"""Tokens to the ranks of their experts, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from mt_fusions import permute, unpermute
from mt_parallel_state import outside_graph
from torch import Tensor

from mt_moe.error import RoutingError
from mt_moe.flight import Travelling, at_once


class Sent(NamedTuple):
    """What arrived at this rank's experts.

    Attributes:
        rows: Sorted by expert. There may be more than `counts` says: zeros, of no expert.
        counts: Rows of each of this rank's experts.
        handle: What `combine` needs.
        exact: Whether `counts` adds up to N.
        most: Rows of the expert that has most, where the host knows it.

    Shape:
        rows: [N, H]; counts: [local experts], int64.
    """

    rows: Tensor
    counts: Tensor
    handle: Any
    exact: bool = True
    most: int = 0


class Dispatcher(ABC):
    """Sends tokens to experts that are dealt to ranks.

    `combine(dispatch(x, e, w).rows, handle)` is `sum_j w[:, j] x` (times the ranks that share an
    expert, each of which returns a part of a sum). Both have gradients. A choice equal to the
    number of experts is none: it is sent nowhere, and adds nothing.

    Both have a start and a finish. What is computed between runs beside the communication, and
    backward beside that of the gradients.
    """

    @property
    def in_graphs(self) -> bool:
        """Whether `torch.compile` may trace it; graphs break around it if not."""
        return False

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False) -> Sent:
        """Send each token to its experts, as `start_dispatch`."""
        run = self._dispatch if self.in_graphs else outside_graph(self._dispatch)
        return run(x, experts, weights, drops=drops)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Bring the experts' results back, as `start_combine`."""
        run = self._combine if self.in_graphs else outside_graph(self._combine)
        return run(rows, handle)

    @abstractmethod
    def start_dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False
    ) -> Travelling:
        """Begin to send each token to its experts.

        Args:
            x: Tokens.
            experts: Their choices.
            weights: Of these, finite.
            drops: Whether there may be choices that are none.

        Shape:
            x: [T, H]; experts, weights: [T, k].

        Raises:
            RoutingError: Weights of some rank are not finite; every rank raises it.
        """

    @abstractmethod
    def finish_dispatch(self, travelling: Travelling) -> Sent:
        """Wait for the tokens of this rank's experts."""

    @abstractmethod
    def start_combine(self, rows: Tensor, handle: Any) -> Travelling:
        """Begin to bring the experts' results back.

        Shape:
            rows: as sent.
        """

    @abstractmethod
    def finish_combine(self, travelling: Travelling) -> Tensor:
        """Wait for the results, and sum each token's, times the weights.

        Shape:
            Returns [T, H].
        """

    def _dispatch(self, *given: Tensor, drops: bool) -> Sent:
        return self.finish_dispatch(self.start_dispatch(*given, drops=drops))

    def _combine(self, rows: Tensor, handle: Any) -> Tensor:
        return self.finish_combine(self.start_combine(rows, handle))


class LocalDispatcher(Dispatcher):
    """For experts that are all on this rank: sorts tokens, and sends nothing. No host waits.

    Args:
        num_experts: How many there are.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    @property
    def in_graphs(self) -> bool:
        """See `Dispatcher`."""
        return True

    def start_dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False
    ) -> Travelling:
        """See `Dispatcher`. Weights that are not finite raise on a CPU, and stop a device."""
        check_finite(weights)
        rows, places, counts = permute(x, experts, self.num_experts + drops)
        counts = counts[: self.num_experts]
        kept = counts.sum() if drops else None
        return at_once(only_first(rows, kept), (counts, places, weights, kept))

    def finish_dispatch(self, travelling: Travelling) -> Sent:
        """See `Dispatcher`."""
        counts, *handle = travelling.way
        return Sent(travelling.edge, counts, tuple(handle), exact=handle[-1] is None)

    def start_combine(self, rows: Tensor, handle: Any) -> Travelling:
        """See `Dispatcher`."""
        return at_once(rows, handle)

    def finish_combine(self, travelling: Travelling) -> Tensor:
        """See `Dispatcher`."""
        places, weights, kept = travelling.way
        return unpermute(only_first(travelling.edge, kept), places, weights)

    def __repr__(self) -> str:
        return f"LocalDispatcher({self.num_experts})"


def only_first(rows: Tensor, kept: Tensor | None) -> Tensor:
    """Set the rows from `kept` on to zero, and their gradients; None keeps all.

    Shape:
        rows: [N, H]; kept: [].
    """
    if kept is None:
        return rows
    none = torch.arange(len(rows), device=rows.device) >= kept
    return rows.masked_fill(none.unsqueeze(1), 0)


def finite(weights: Tensor) -> Tensor:
    """Whether all of a router's weights are numbers.

    Shape:
        Returns [], bool.
    """
    return weights.detach().isfinite().all()


def check_finite(weights: Tensor) -> None:
    """Raise RoutingError for NaN; on CUDA the device stops, and no host waits for it."""
    if weights.is_meta or torch.compiler.is_compiling():
        return
    try:
        torch._assert_async(finite(weights), "a router's weights are not finite")
    except RuntimeError:
        if weights.device.type != "cpu":
            raise
        raise RoutingError(not_finite("this rank, or of one that shares its tokens,")) from None


def not_finite(who: str) -> str:
    """Return the message for weights that are NaN or infinite."""
    return (
        f"the router's weights of {who} are not finite: its logits are NaN or infinite; look at "
        "the hidden states before this layer, the learning rate, and the router's weight"
    )
