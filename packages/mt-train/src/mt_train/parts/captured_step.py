"""What follows the passes of a step, from the gradients to new weights, as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

from mt_data_parallel import reduce_partial_grads
from mt_fusions import Graph, GraphPool
from mt_optim import DeviceStep, DistributedOptimizer, StepResult
from mt_parallel_state import ParallelState
from torch import Tensor

from mt_train.agreement import uploaded


class CapturedStep:
    """Sums partial gradients, measures, decides, clips, updates and gathers in one graph.

    The first step is watched, the second captured. On a CPU all run eagerly, held to the rules of a
    graph. The host writes before (rates, loss scale) and reads once behind (sums, norms, and
    whether the step was taken).

    Args:
        optimizer: What steps; `device_step_obstacle` has nothing against it.
        state: This rank's place.
        pool: Of the run's graphs.
        on_eager: Told once of each reason why steps are not captured.

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
        self._step, self._optimizer, self._state = DeviceStep(optimizer), optimizer, state
        self.graph: Graph[[Tensor, Tensor], Tensor] = Graph(
            self._run,
            state=self._step.tensors,
            name="the optimizer's step",
            pool=pool,
            warmup=1,
            on_eager=on_eager,
        )

    def __call__(
        self, also: Tensor, *, lr: float, weight_decay: float
    ) -> tuple[list[float], StepResult]:
        """Take a step, or leave everything as it was; every rank calls it.

        Args:
            also: This rank's numbers to sum over ranks, on the device.
            lr: Learning rate.
            weight_decay: Weight decay.

        Returns:
            The sums, and what was done.
        """
        numbers = self._step.numbers(lr=lr, weight_decay=weight_decay)
        return self._step.read(self.graph(uploaded(numbers, self._state.device), also))

    def _run(self, numbers: Tensor, also: Tensor) -> Tensor:
        reduce_partial_grads(self._optimizer.pieces, self._state)
        return self._step(numbers, also)
