"""An optimizer step without the host, for a CUDA graph."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import replace

import torch
from mt_data_parallel import grad_of
from mt_files import check_type
from torch import Tensor

from mt_optim.distributed import DistributedOptimizer
from mt_optim.gradients.guard import StepGuard
from mt_optim.gradients.result import StepResult

_RATES: tuple[str, ...] = ("lr", "weight_decay")


def device_step_obstacle(optimizer: DistributedOptimizer) -> str | None:
    """Return why the device can't take an optimizer's steps alone; None if it can."""
    check_type("optimizer", optimizer, DistributedOptimizer)
    inner, buffer = optimizer.inner, optimizer.buffer
    if inner.guard is None:
        return "no guard measures the gradients; make the optimizer by build_optimizer"
    if any(bucket.release != "nothing" or bucket.offload for bucket in buffer.buckets):
        return "its GradBuffer releases or offloads memory, which has to stay where it is"
    if not buffer.waits:
        return "forwards wait for parameters one after the other; use no prefetch"
    return inner.device_obstacle()


class DeviceStep:
    """A step of a `DistributedOptimizer` that runs on the device alone.

    Before the step the host writes its inputs, `numbers`: the loss scale and the rates of each
    group. The call, eager or as a replayed CUDA graph, measures the gradients, decides whether the
    step is taken, unscales and clips, updates weights and states, and gathers sharded weights. A
    skipped step runs the same kernels and changes nothing. After the step the host reads once
    (`read`).

    The results equal the optimizer's `measure` and `step`, to the last bit on a CPU. A
    fused kernel on a CUDA device reads its learning rate in fp32.

    Args:
        optimizer: The optimizer to step.

    Attributes:
        tensors: The current weights, gradients and states of the step, by name.

    Raises:
        ValueError: `device_step_obstacle` says why not.
        TypeError: `optimizer` is not a DistributedOptimizer.

    Example:
        >>> model, state = torch.nn.Linear(4, 2), ParallelState(ParallelLayout())
        >>> buffer = GradBuffer(model.named_parameters(), group=None)
        >>> config = OptimizerConfig(lr=0.1, max_norm=1.0)
        >>> make = lambda shards: build_optimizer(shards, config, state)
        >>> optimizer = DistributedOptimizer(buffer, make)
        >>> step = DeviceStep(optimizer)
        >>> buffer.start(num_backwards=1)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> buffer.finish()
        >>> numbers = torch.tensor(step.numbers(lr=0.05), dtype=torch.float64)
        >>> sums, result = step.read(step(numbers, torch.tensor([7.0])))
        >>> sums, result.stepped, round(result.grad_norm, 3)
        ([7.0], True, 3.162)
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        why = device_step_obstacle(optimizer)
        if why is not None:
            raise ValueError(f"the device can't step this optimizer alone: {why}")
        self._optimizer = optimizer
        self._rates: list[dict[str, float]] = []
        self.tensors: Mapping[str, Tensor] = _Tensors(optimizer)

    def numbers(self, *, lr: float | None = None, weight_decay: float | None = None) -> list[float]:
        """Return the inputs of the next call, to be moved to the device in fp64.

        It communicates the first time, if statistics are described by group.

        Args:
            lr: As for the optimizer's `step`.
            weight_decay: As for the optimizer's `step`.

        Raises:
            ValueError: A rate is out of range.
            TypeError: A rate is not a number.
            RuntimeError: The gradients are not reduced.
        """
        self._optimizer.buffer.check_finished()
        inner = self._optimizer.inner
        self._rates = inner.rates(lr=lr, weight_decay=weight_decay)
        self._guard.prepare()
        groups = zip(inner.param_groups, self._rates, strict=True)
        rates = [float({**group, **new}[key]) for group, new in groups for key in _RATES]
        return [self._guard.scale, *rates]

    @torch.no_grad()
    def __call__(self, numbers: Tensor, also: Tensor) -> Tensor:
        """Take the step or skip it; every rank calls it.

        It communicates as `measure` and `step` do, and does not wait for the device.

        Args:
            numbers: The result of `numbers`.
            also: Numbers of this rank, such as losses, to sum over all ranks. The step is skipped
                if a sum is not finite.

        Returns:
            The input of `read`.
        """
        scale, *rates = numbers.unbind()
        pairs = zip(rates[::2], rates[1::2], strict=True)
        decision = self._guard.decide(scale, also)
        self._guard.restrain(decision)
        groups = [dict(zip(_RATES, pair, strict=True)) for pair in pairs]
        self._optimizer.inner.update_on_device(groups, 1 - decision[0])
        self._optimizer.buffer.gather_params()
        return decision

    def read(self, found: Tensor) -> tuple[list[float], StepResult]:
        """Wait for the device and return the sums of `also`, and the result of the step.

        It communicates only if the step was skipped, to name the gradients at fault.
        """
        # A replayed graph has gathered the parameters without calling the buffer.
        self._optimizer.buffer.note_gathered()
        inner = self._optimizer.inner
        others = self._guard.read(found.tolist())
        result = self._guard.conclude()
        if not result.stepped:
            return others, replace(result, step=inner.step_count + 1)
        # The rates are recorded only now, as a skipped step leaves the groups unchanged.
        for group, new in zip(inner.param_groups, self._rates, strict=True):
            group.update(new)
        return others, result

    @property
    def _guard(self) -> StepGuard:
        guard = self._optimizer.inner.guard
        assert guard is not None, "device_step_obstacle looked"  # noqa: S101
        return guard


class _Tensors(Mapping[str, Tensor]):
    """The tensors of a step, looked up anew each time, as states may move."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer

    def _now(self) -> dict[str, Tensor]:
        optimizer, found = self._optimizer, dict[str, Tensor]()
        found |= _gradients(optimizer)
        for name in optimizer.inner.names:
            param = optimizer.inner.shard(name).param
            found[name] = param.detach()
            found |= {f"{key} of {name}": x for key, x in optimizer.inner.state[param].items()}
        buckets = enumerate(optimizer.buffer.buckets)
        found |= {f"parameters {i}": b.params for i, b in buckets if b.params is not None}
        return found

    def __getitem__(self, name: str) -> Tensor:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def items(self) -> ItemsView[str, Tensor]:
        """Return all names and tensors, looked up once."""
        return self._now().items()


def _gradients(optimizer: DistributedOptimizer) -> dict[str, Tensor]:
    """Return the gradients of this rank's shards, by name."""
    params = {name: optimizer.inner.shard(name).param for name in optimizer.inner.names}
    found = {f"the gradient of {name}": grad_of(param) for name, param in params.items()}
    return {name: grad.detach() for name, grad in found.items() if grad is not None}
