"""The optimizer's step, from summed gradients to new weights."""

from __future__ import annotations

from mt_data_parallel import reduce_partial_grads
from mt_optim import DistributedOptimizer, StepResult
from mt_parallel_state import ParallelState
from torch import Tensor


class Update:
    """The optimizer's step in eager mode, after the host has read the losses.

    Args:
        optimizer: The optimizer.
        state: This rank's place in the layout.
    """

    def __init__(self, optimizer: DistributedOptimizer, state: ParallelState) -> None:
        self.optimizer, self.state = optimizer, state

    def reduce(self) -> None:
        """Sum partial gradients over ranks; every rank calls it."""
        reduce_partial_grads(self.optimizer.shards, self.state)

    def measure(self, own: Tensor, *, lr: float, weight_decay: float) -> list[float]:
        """Sum this rank's numbers over all ranks, with the gradient's norm, and wait for them.

        Args:
            own: Numbers of this rank, on the device.
            lr: Learning rate of the step.
            weight_decay: Weight decay of the step.
        """
        del lr, weight_decay
        return self.optimizer.measure(own)

    def finish(self, *, lr: float, weight_decay: float) -> StepResult:
        """Clip, update and gather the weights, or leave them unchanged; the result says which."""
        return self.optimizer.step(lr=lr, weight_decay=weight_decay)
