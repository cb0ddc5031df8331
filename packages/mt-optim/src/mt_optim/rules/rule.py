"""An update rule: a pure function of parameters, gradients and states."""

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
    """Parameters with one rule and the same options, for a joint update.

    Attributes:
        shards: The shards; a shard's `source` has the sharding record.
        masters: The full-precision tensors to update; a parameter in full precision is its own
            master.
        grads: The gradients in the masters' dtype and shape.
        states: The step, and the moments in the masters' dtype, by name; updated in place.
        skip: On the device, 1 to change nothing and 0 to update; None to update.
    """

    shards: list[ParamShard]
    masters: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Tensor]]
    skip: Tensor | None = None

    def moment(self, key: str) -> list[Tensor]:
        """Return the tensor with this name from each state."""
        return [state[key] for state in self.states]

    def pick(self, indices: list[int]) -> Batch:
        """Return the batch of some of the parameters."""
        return Batch(
            [self.shards[i] for i in indices],
            [self.masters[i] for i in indices],
            [self.grads[i] for i in indices],
            [self.states[i] for i in indices],
            self.skip,
        )

    def count(self) -> None:
        """Add one to the step of each state."""
        if self.states:
            torch._foreach_add_(self.moment("step"), 1)


class Rule(ABC):
    """One optimizer's arithmetic, without parameters, memory or communication of its own.

    Attributes:
        name: Name of the rule in parameter groups.
        is_elementwise: Whether any flat range of a parameter can be stepped alone; other rules need
            whole matrices.
        takes_tensor_lr: Whether a group's `lr` may be a tensor, for a step in a CUDA graph.
        makes_more: Whether the rule adds tensors to a state while it runs.
        moments: Names of the rule's state tensors with the parameter's shape.
        options: Options of a group beside `lr` and `weight_decay`, with their defaults.
    """

    name: ClassVar[str]
    is_elementwise: ClassVar[bool] = True
    takes_tensor_lr: ClassVar[bool] = False
    makes_more: ClassVar[bool] = False
    moments: tuple[str, ...]
    options: Mapping[str, Any]

    @abstractmethod
    def check(self, group: Mapping[str, Any]) -> None:
        """Check this rule's options in a group.

        Raises:
            TypeError: An option has the wrong type.
            ValueError: An option is out of range.
        """

    def new_state(self, shard: ParamShard, master: Tensor) -> dict[str, Tensor]:
        """Return the state before the first step, without the master."""
        state = {"step": torch.zeros((), dtype=torch.float32)}
        for key in self.moments:
            state[key] = torch.zeros_like(master, requires_grad=False)
        return state

    def factors(self, state: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Name the state tensors with shapes of their own, which are whole on each rank."""
        return ()

    def device_obstacle(self, master: Tensor) -> str | None:
        """Return why the rule can't take rates and `Batch.skip` on the device; None if it can.

        Then a group's `lr` and `weight_decay` may be fp64 tensors without dims.
        """
        return f"{self.name} has its rate as a number of Python; adamw has it on the device"

    @abstractmethod
    def update(self, batch: Batch, group: Mapping[str, Any]) -> None:
        """Update masters and states of a batch in place, and count the step."""
