"""The record of one router's choices, to write or to replay."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mt_moe.error import RoutingError
from mt_moe.recomputation import in_backward


class RoutingRecord:
    """The choices of one router, one tensor per forward.

    A recomputation inside backward takes the choice of its own forward again. That relies on
    backwards in the order of their forwards, as in 1F1B.

    Args:
        choices: Choices to replay; None records.
    """

    def __init__(self, choices: Sequence[Tensor] | None = None) -> None:
        self.replays = choices is not None
        self.choices: list[Tensor] = list(choices or ())
        self._next = [0, 0]  # index of the next forward, and of the next recomputation

    def take(self) -> Tensor | None:
        """Return the next choice, or None if the router has to choose and record.

        Raises:
            RoutingError: All choices were taken.
        """
        is_recomputation = in_backward()
        if not self.replays and not is_recomputation:
            return None
        index = self._next[is_recomputation]
        if index >= len(self.choices):
            raise RoutingError(
                f"forward {index + 1} has no recorded choice, the record has {len(self.choices)}; "
                "replay the batches that were recorded, in their order"
            )
        self._next[is_recomputation] += 1
        return self.choices[index]

    def put(self, experts: Tensor) -> None:
        """Record a choice, unless it was taken from the record."""
        if not self.replays and not in_backward():
            self.choices.append(experts.detach().clone())
