"""Any class of torch.optim as a rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mt_data_parallel import ParamShard
from mt_parallel_state import ParallelState
from torch import Tensor

from mt_optim.parameters.matrix import TPSplit
from mt_optim.rules.rule import Batch, Rule

# Classes that look at one element at a time: a part of a parameter is stepped like the whole.
_ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam")
_ELEMENTWISE += ("RMSprop", "Rprop", "SGD")


class TorchRule(Rule):
    """A class of torch.optim, made anew for each step around the masters and their state.

    Its state is made in its first step, so it can be saved and loaded through state dicts only.

    Args:
        class_name: Name of the class, such as "Adafactor" or "RAdam".
        options: Its arguments beside `params`, `lr` and `weight_decay`.
        state: Process groups; a class that needs whole parameters refuses what they split.

    Raises:
        ValueError: torch.optim has no such class, or it can't be stepped without a closure.
        TypeError: The class does not take an option.
    """

    makes_more = True
    moments = ()

    def __init__(
        self,
        class_name: str,
        options: Mapping[str, Any] | None = None,
        *,
        state: ParallelState | None = None,
    ) -> None:
        found = getattr(torch.optim, class_name, None)
        known = isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
        if not known:
            raise ValueError(
                f"torch.optim has no optimizer {class_name!r:.60}; write it as it does"
            )
        if class_name in ("LBFGS", "SparseAdam", "Optimizer"):
            raise ValueError(
                f"torch.optim.{class_name} can't run here: it needs closures, or sparse gradients"
            )
        self._class: Any = found
        self._given, self._state = dict(options or {}), state
        self.is_elementwise = class_name in _ELEMENTWISE  # pyright: ignore[reportAttributeAccessIssue]
        defaults = self._class([torch.zeros(1)], **self._given).defaults
        self.name = class_name  # pyright: ignore[reportAttributeAccessIssue] (one per class)
        self.takes_decay = "weight_decay" in defaults
        self.options = {
            key: value for key, value in defaults.items() if key not in ("lr", "weight_decay")
        }

    def check(self, group: Mapping[str, Any]) -> None:
        """Have the class check its options."""
        self._class([torch.zeros(1)], **self._arguments(group))
        if group["weight_decay"] and not self.takes_decay:
            raise ValueError(f"torch.optim.{self.name} has no weight_decay; make it 0")

    def new_state(self, shard: ParamShard, master: Tensor) -> dict[str, Tensor]:
        """Return the step alone; the class makes the rest.

        Raises:
            ValueError: The class needs a whole parameter, and this is a part of one.
        """
        if not self.is_elementwise:
            self._check_whole(shard)
        return {"step": torch.zeros((), dtype=torch.float32)}

    def _check_whole(self, shard: ParamShard) -> None:
        why = f"torch.optim.{self.name} looks at whole parameters and this is a part of one; "
        if not shard.is_whole:
            raise ValueError(f"{why}give the GradBuffer whole=lambda name, param: True")
        if TPSplit(shard.source, self._state).groups:
            raise ValueError(f"{why}train it without tensor parallelism, or by another optimizer")

    def update(self, batch: Batch, group: Mapping[str, Any]) -> None:
        """Step an optimizer of the class."""
        masters = [master.detach() for master in batch.masters]
        inner = self._class(masters, **self._arguments(group))
        batch.count()
        counted = batch.moment("step")
        for master, grad, state in zip(masters, batch.grads, batch.states, strict=True):
            master.grad = grad
            # In its first step the class makes the state itself.
            if int(state["step"]) > 1:
                own = {key: value for key, value in state.items() if key != "master"}
                own["step"] = state["step"] - 1
                inner.state[master] = own
        inner.step()
        for master, state, step in zip(masters, batch.states, counted, strict=True):
            state.update({k: v for k, v in inner.state[master].items() if isinstance(v, Tensor)})
            state["step"] = step

    def _arguments(self, group: Mapping[str, Any]) -> dict[str, Any]:
        keys = ["lr", *(["weight_decay"] if self.takes_decay else []), *self._taken()]
        return {key: group[key] for key in keys}

    def _taken(self) -> list[str]:
        """Return the options that the constructor has; some defaults are the class's own."""
        import inspect

        return [key for key in inspect.signature(self._class).parameters if key in self.options]
