"""The choices of one router, written down or read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mt_moe.backward import in_backward
from mt_moe.error import RoutingError


class RoutingRecord:
    """The choices of one router, a tensor per forward, in their order.

    A recomputation inside of backward takes the choice of its own forward again; it relies on
    backwards that come in the order of their forwards, as 1F1B's do.

    Args:
        choices: To be played; None records.
    """

    def __init__(self, choices: Sequence[Tensor] | None = None) -> None:
        self.plays = choices is not None
        self.choices: list[Tensor] = list(choices or ())
        self._next = [0, 0]  # of forwards, and of recomputations

    def take(self) -> Tensor | None:
        """Return the choice that is next; None where one is to be made and recorded.

        Raises:
            RoutingError: All of them were taken.
        """
        again = in_backward()
        if not self.plays and not again:
            return None
        index = self._next[again]
        if index >= len(self.choices):
            raise RoutingError(
                f"forward {index + 1} has no recorded choice: there are {len(self.choices)}; play "
                "the batches that were recorded, in their order"
            )
        self._next[again] += 1
        return self.choices[index]

    def put(self, experts: Tensor) -> None:
        """Record a choice."""
        if not self.plays and not in_backward():
            self.choices.append(experts.detach().clone())
