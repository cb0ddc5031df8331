"""The interface of a dispatcher, which sends tokens to their experts' ranks, and results back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from mt_parallel_state import outside_graph
from torch import Tensor

from mt_moe.dispatch.agreement import Agreement
from mt_moe.dispatch.in_flight import InFlight
from mt_moe.groups import ExpertGroups


class DispatchOutput(NamedTuple):
    """The rows that arrived for this rank's experts.

    Attributes:
        rows: Rows sorted by expert; those after the last expert's are zeros.
        counts: Number of rows of each of this rank's experts.
        handle: What `combine` needs to bring the results back.
        exact: Whether the counts add up to N.
        max_count: The largest count, where the host knows it; otherwise 0.

    Shape:
        rows: [N, H]; counts: [local experts], int64.
    """

    rows: Tensor
    counts: Tensor
    handle: Any
    exact: bool = True
    max_count: int = 0


class Dispatcher(ABC):
    """Sends tokens to experts on several ranks.

    `combine(dispatch(x, e, w).rows, handle)` is `sum_j w[:, j] x`, times the number of ranks that
    share an expert, each of which returns a partial sum. Both are differentiable. A choice equal to
    the number of experts means no expert: it is sent nowhere and adds nothing.

    Dispatch and combine both have a start and a finish. Work between the two overlaps with the
    communication, and its backward with the communication of the gradients.
    """

    @property
    def in_graphs(self) -> bool:
        """Whether `torch.compile` may trace it; otherwise graphs break around it."""
        return False

    def dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False
    ) -> DispatchOutput:
        """Send each token to its experts; see `start_dispatch`."""
        run = self._dispatch if self.in_graphs else outside_graph(self._dispatch)
        return run(x, experts, weights, drops=drops)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Bring the experts' results back and return each token's weighted sum."""
        run = self._combine if self.in_graphs else outside_graph(self._combine)
        return run(rows, handle)

    @abstractmethod
    def start_dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor, *, drops: bool = False
    ) -> InFlight:
        """Start to send each token to its experts.

        Args:
            x: Tokens.
            experts: Chosen experts of each token.
            weights: Finite weights of the choices.
            drops: Whether some choices may mean no expert.

        Shape:
            x: [T, H]; experts, weights: [T, k].

        Raises:
            RoutingError: Weights of some rank are not finite; every rank raises it.
        """

    @abstractmethod
    def finish_dispatch(self, in_flight: InFlight) -> DispatchOutput:
        """Wait for the tokens of this rank's experts."""

    @abstractmethod
    def start_combine(self, rows: Tensor, handle: Any) -> InFlight:
        """Start to bring the experts' results back.

        Shape:
            rows: [N, H], as in `DispatchOutput`.
        """

    @abstractmethod
    def finish_combine(self, in_flight: InFlight) -> Tensor:
        """Wait for the results, and return each token's weighted sum.

        Shape:
            Returns [T, H].
        """

    def _dispatch(self, *args: Tensor, drops: bool) -> DispatchOutput:
        return self.finish_dispatch(self.start_dispatch(*args, drops=drops))

    def _combine(self, rows: Tensor, handle: Any) -> Tensor:
        return self.finish_combine(self.start_combine(rows, handle))


class GroupDispatcher(Dispatcher):
    """A dispatcher over several ranks, which agree on the layer before their first exchange.

    Args:
        num_experts: Experts of the whole layer.
        groups: The ranks that share them.
    """

    def __init__(self, num_experts: int, groups: ExpertGroups) -> None:
        self.groups, self.num_experts = groups, num_experts
        self.local_experts = groups.local_experts(num_experts)
        self._agreement = Agreement(groups.experts)

    def _agree(self, x: Tensor, **settings: object) -> None:
        sizes = {"num_experts": self.num_experts, "hidden_size": x.shape[1]}
        self._agreement.check(x.device, **sizes, **settings)
