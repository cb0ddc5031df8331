"""What an update rule is: a pure function over parameters, gradients and states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from mt_data_parallel import ParamShard
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Parameters that are updated together: they have one rule and the same options.

    Attributes:
        shards: What they are of; a shard's `source` has the sharding record.
        masters: What is updated, in full precision; the parameter itself where that has it.
        grads: In the masters' dtype and shape.
        states: By name the step, and the moments in the masters' dtype; updated in place.
        skip: On the device 1 where nothing may change, and 0 where it may; None for what may.
    """

    shards: list[ParamShard]
    masters: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Tensor]]
    skip: Tensor | None = None

    def moment(self, key: str) -> list[Tensor]:
        """Return one tensor of each state."""
        return [state[key] for state in self.states]

    def pick(self, indices: list[int]) -> Batch:
        """Return a part of it."""
        return Batch(
            [self.shards[i] for i in indices],
            [self.masters[i] for i in indices],
            [self.grads[i] for i in indices],
            [self.states[i] for i in indices],
            self.skip,
        )

    def count(self) -> None:
        """Add one to the steps."""
        if self.states:
            torch._foreach_add_(self.moment("step"), 1)


class Rule(ABC):
    """One optimizer's arithmetic, without parameters, memory or communication of its own.

    Attributes:
        name: What a group calls it.
        is_elementwise: Whether any flat range of a parameter can be stepped alone. A rule that is
            not needs whole matrices.
        takes_tensor_lr: Whether a group's `lr` may be a tensor, for a step in a CUDA graph.
        makes_more: Whether it adds tensors to a state while it runs.
        moments: Names of the tensors of the parameter's shape that it keeps.
        options: What a group may set beside `lr` and `weight_decay`, with the defaults.
    """

    name: ClassVar[str]
    is_elementwise: ClassVar[bool] = True
    takes_tensor_lr: ClassVar[bool] = False
    makes_more: ClassVar[bool] = False
    moments: tuple[str, ...]
    options: Mapping[str, Any]

    @abstractmethod
    def check(self, group: Mapping[str, Any]) -> None:
        """Check the options of a group that are this rule's.

        Raises:
            TypeError: One of them is not of its type.
            ValueError: One of them is out of range.
        """

    def new_state(self, shard: ParamShard, master: Tensor) -> dict[str, Tensor]:
        """Return the state before the first step, without the master."""
        state = {"step": torch.zeros((), dtype=torch.float32)}
        for key in self.moments:
            state[key] = torch.zeros_like(master, requires_grad=False)
        return state

    def factors(self, state: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Name the tensors of a state with shapes of their own, whole on every rank that has it."""
        return ()

    def device_obstacle(self, master: Tensor) -> str | None:
        """Say why it can't update where rates and `Batch.skip` are numbers on the device.

        Where it can (None), a group's `lr` and `weight_decay` may be tensors of fp64 without dims.
        """
        return f"{self.name} has its rate as a number of Python; adamw has it on the device"

    @abstractmethod
    def update(self, batch: Batch, group: Mapping[str, Any]) -> None:
        """Update masters and states of a batch in place, and count the step."""
