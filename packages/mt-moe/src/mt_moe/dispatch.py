"""Tokens to the ranks of their experts, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from mt_fusions import permute, unpermute
from torch import Tensor

from mt_moe.error import RoutingError


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


class Dispatcher(Protocol):
    """Sends tokens to experts that are dealt to ranks.

    `combine(dispatch(x, e, w).rows, handle)` is `sum_j w[:, j] x` (times the ranks that share an
    expert, each of which returns a part of a sum). Both have gradients. A choice equal to the
    number of experts is none: it is sent nowhere, and adds nothing.
    """

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False) -> Sent:
        """Send each token to its experts.

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
        ...

    def start(
        self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False
    ) -> Callable[[], Sent]:
        """Begin what `dispatch` does, of the same arguments.

        Returns:
            A function that waits for it. What is computed before its call runs beside the
            communication, and backward beside that of the gradients.
        """
        ...

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Bring the experts' results back and sum each token's, times the weights.

        Shape:
            rows: as sent. Returns [T, H].
        """
        ...


class LocalDispatcher:
    """For experts that are all on this rank: sorts tokens, and sends nothing. No host waits.

    Args:
        num_experts: How many there are.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False) -> Sent:
        """See `Dispatcher`. Weights that are not finite raise on a CPU, and stop a device."""
        check_finite(weights)
        rows, places, counts = permute(x, experts, self.num_experts + drops)
        counts = counts[: self.num_experts]
        kept = counts.sum() if drops else None
        return Sent(only_first(rows, kept), counts, (places, weights, kept), exact=not drops)

    def start(
        self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False
    ) -> Callable[[], Sent]:
        """See `Dispatcher`. There is nothing to wait for."""
        sent = self.dispatch(x, experts, weights, drops=drops)
        return lambda: sent

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """See `Dispatcher`."""
        places, weights, kept = handle
        return unpermute(only_first(rows, kept), places, weights)

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
