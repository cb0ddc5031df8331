"""An exponential moving average of the weights, kept with the optimizer's state."""

from __future__ import annotations

import torch
from mt_files import check_type
from torch import Tensor

from mt_optim.checks import check_fraction
from mt_optim.state.named_state import NamedState

_KEY = "ema"


class EMA:
    """The exponential moving average of an optimizer's masters.

    After step t it is `e = d e + (1 - d) w` with `d = min(decay, (1 + t) / (10 + t))`, so that the
    initial weights are forgotten quickly. It lies in the optimizer's state, in the masters' dtype:
    it is sharded like them, and saved and loaded by state dicts. An optimizer updates its `ema` in
    each step that is not skipped. Nothing waits for the device.

    Args:
        optimizer: The optimizer whose masters are averaged; the average starts with their values.
        decay: Decay rate after many steps.

    Raises:
        ValueError: `decay` is not in [0, 1).
        TypeError: `decay` is not a number.
    """

    def __init__(self, optimizer: NamedState, decay: float) -> None:
        check_type("optimizer", optimizer, NamedState)
        check_fraction("decay", decay)
        self.decay = decay
        self._optimizer = optimizer
        self.restart()

    def value(self, name: str) -> Tensor:
        """Return the average of a parameter.

        Shape:
            The parameter's. Writing into it changes the state.

        Raises:
            KeyError: There is no such parameter.
        """
        return self._optimizer.state[self._optimizer.shard(name).param][_KEY]

    @torch.no_grad()
    def restart(self) -> None:
        """Set the average to the current weights, after weights were loaded."""
        for name in self._optimizer.names:
            state = self._optimizer.state[self._optimizer.shard(name).param]
            state[_KEY] = self._optimizer.master(name).clone()

    @torch.no_grad()
    def update(self, *, skip: Tensor | None = None) -> None:
        """Add the weights of a step to the average.

        Args:
            skip: On the device, 1 to change nothing, 0 to update.
        """
        optimizer, weight = self._optimizer, None
        copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # each is a wait for the host
        for name in optimizer.names:
            master, state = optimizer.master(name), optimizer.state[optimizer.shard(name).param]
            if weight is None:  # all parameters have taken the same steps
                done = state["step"].to(torch.float64)
                weight = 1 - ((1 + done) / (10 + done)).clamp(max=self.decay)
                weight = weight if skip is None else weight * (1 - skip)
            kind = master.device, master.dtype
            if kind not in copies:
                copies[kind] = weight.to(*kind)
            state[_KEY].lerp_(master, copies[kind])
