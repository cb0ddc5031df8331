"""The optimizer's step as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

from mt_fusions import Graph, GraphPool
from mt_optim import DeviceStep, DistributedOptimizer, StepResult
from mt_parallel_state import ParallelState
from torch import Tensor

from mt_train.agreement import uploaded
from mt_train.parts.update import Update


class CapturedUpdate(Update):
    """An update that sums partial gradients, measures, decides, clips and gathers in one graph.

    The first step is watched, the second is captured. On a CPU all steps run eagerly, held to the
    rules of a graph. The host writes rates and the loss scale before a step, and reads the sums,
    the norms and whether the step was taken once after it.

    Args:
        optimizer: The optimizer; `device_step_obstacle` finds nothing against it.
        state: This rank's place in the layout.
        pool: Memory pool of the run's graphs.
        on_eager: Function to call once with each reason why steps are not captured.

    Attributes:
        graph: The graph.
    """

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        state: ParallelState,
        *,
        pool: GraphPool,
        on_eager: Callable[[str], object],
    ) -> None:
        super().__init__(optimizer, state)
        self._step = DeviceStep(optimizer)
        self._result: StepResult | None = None
        self.graph: Graph[[Tensor, Tensor], Tensor] = Graph(
            self._run,
            state=self._step.tensors,
            name="the optimizer's step",
            pool=pool,
            warmup=1,
            on_eager=on_eager,
        )

    def reduce(self) -> None:
        """Do nothing: the graph sums partial gradients too."""

    def measure(self, own: Tensor, *, lr: float, weight_decay: float) -> list[float]:
        """Take the whole step on the device, and wait for its sums."""
        numbers = self._step.numbers(lr=lr, weight_decay=weight_decay)
        found = self.graph(uploaded(numbers, self.state.device), own)
        sums, self._result = self._step.read(found)
        return sums

    def finish(self, *, lr: float, weight_decay: float) -> StepResult:
        """Return what `measure` has done."""
        del lr, weight_decay
        assert self._result is not None, "measured before"  # noqa: S101
        return self._result

    def _run(self, numbers: Tensor, also: Tensor) -> Tensor:
        super().reduce()
        return self._step(numbers, also)
