"""Dispatch on one rank with all experts."""

from __future__ import annotations

from typing import Any

from mt_fusions import permute, unpermute
from torch import Tensor

from mt_moe.dispatch.dispatcher import Dispatcher, DispatchOutput
from mt_moe.dispatch.finite import check_finite
from mt_moe.dispatch.in_flight import InFlight, arrived
from mt_moe.padding import only_first


class LocalDispatcher(Dispatcher):
    """Sorts the tokens by expert on a rank with all experts. The host never waits.

    Args:
        num_experts: Number of experts.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    @property
    def in_graphs(self) -> bool:
        """See `Dispatcher`."""
        return True

    def start_dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False
    ) -> InFlight:
        """See `Dispatcher`. Weights that are not finite raise on a CPU, and stop a CUDA device."""
        check_finite(weights)
        rows, places, counts = permute(x, experts, self.num_experts + drops)
        counts = counts[: self.num_experts]
        kept = counts.sum() if drops else None
        return arrived(only_first(rows, kept), (counts, places, weights, kept))

    def finish_dispatch(self, in_flight: InFlight) -> DispatchOutput:
        """See `Dispatcher`."""
        counts, *handle = in_flight.handle
        return DispatchOutput(in_flight.edge, counts, tuple(handle), exact=handle[-1] is None)

    def start_combine(self, rows: Tensor, handle: Any) -> InFlight:
        """See `Dispatcher`."""
        return arrived(rows, handle)

    def finish_combine(self, in_flight: InFlight) -> Tensor:
        """See `Dispatcher`."""
        places, weights, kept = in_flight.handle
        return unpermute(only_first(in_flight.edge, kept), places, weights)
