"""ZeRO: an optimizer whose state is sharded over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_data_parallel import GradBuffer, ParamShard
from mt_files import check_type
from torch import Tensor

from mt_optim.checks import check_function
from mt_optim.gradients.result import StepResult
from mt_optim.gradients.scaler import GradScaler
from mt_optim.optimizer import NamedOptimizer


class DistributedOptimizer:
    """A `NamedOptimizer` over the shards of a `GradBuffer`, so that its state is sharded like them.

    If the reduction has shards (ZeRO-1), `GradBuffer.finish` reduce-scatters the gradients, and
    `step` updates this rank's shards and all-gathers the parameters: the same sum, and the same
    arithmetic per element, as the replicated optimizer. Without shards, or on one rank, it is the
    plain optimizer and communicates nothing.

    Args:
        buffer: The buffer of parameters and gradients.
        make: Function that makes the optimizer of its shards. Decisions by parameter, such as
            weight decay, depend on a shard's `source`, as its `param` may be a flat range.

    Attributes:
        buffer: The buffer.
        shards: The shards that this rank steps.
        inner: The optimizer that steps them. A rank without shards steps an empty one.

    Raises:
        TypeError: An argument has the wrong type.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> buffer = GradBuffer(model.named_parameters(), group=None)
        >>> optimizer = DistributedOptimizer(buffer, lambda shards: AdamW(shards, lr=0.1))
        >>> buffer.start(num_backwards=1)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> buffer.finish()
        >>> optimizer.step().stepped
        True
    """

    def __init__(
        self,
        buffer: GradBuffer,
        make: Callable[[list[ParamShard]], NamedOptimizer],
    ) -> None:
        check_type("buffer", buffer, GradBuffer)
        check_function("make", make)
        self.buffer = buffer
        self.shards: list[ParamShard] = buffer.shards()
        # A rank without shards runs the same steps as the others, whose collectives need it.
        self.inner = make(self.shards or [buffer.empty_shard()])

    @property
    def step_count(self) -> int:
        """The number of steps taken."""
        return self.inner.step_count

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scale of fp16; None if there is none."""
        return self.inner.scaler

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss before its backward; 1 without a scaler."""
        return self.inner.loss_scale

    def measure(self, also: Tensor | None = None) -> list[float]:
        """Measure the gradients for the next `step` and sum numbers in the same message.

        All ranks call it. Numbers on which ranks have to agree travel with the norm and are known
        before anything changes: one message and one wait for the device in the whole step.

        Args:
            also: Numbers of this rank, such as losses, on the device. The step is skipped if a sum
                is not finite.

        Returns:
            Their sums over all ranks of the layout, with the same bits on each.

        Raises:
            RuntimeError: The gradients are not reduced, or the optimizer has no guard;
                `build_optimizer` gives it one.
        """
        self.buffer.check_finished()
        if self.inner.guard is None:
            raise RuntimeError(
                "the optimizer has no guard to measure gradients; make it by build_optimizer, or "
                "set optimizer.inner.guard to a StepGuard"
            )
        return self.inner.guard.measure(also)

    def step(self, **options: Any) -> StepResult:
        """Update this rank's shards, then gather the parameters; every rank calls it.

        Args:
            **options: Options of the inner optimizer's `step`.

        Returns:
            The result of that step.

        Raises:
            RuntimeError: The gradients are not reduced: `GradBuffer.finish` was not called.
        """
        self.buffer.check_finished()
        result = self.inner.step(**options)
        self.buffer.gather_params()
        return result

    def sync_params(self) -> None:
        """Set the parameters to their masters on all ranks; every rank calls it."""
        self.inner.sync_params()
        self.buffer.gather_params()
