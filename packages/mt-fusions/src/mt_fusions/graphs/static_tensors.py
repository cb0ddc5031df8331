"""The inputs of a graph: memory that stays, into which each call copies its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten


def device_of(leaves: Iterable[Any], state: Iterable[tuple[str, Tensor]]) -> torch.device:
    """Return the device of the first tensor that is not on the CPU, else the CPU."""
    tensors = [*(x for x in leaves if isinstance(x, Tensor)), *(x for _, x in state)]
    devices = (x.device for x in tensors)
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


class StaticTensors:
    """What a captured callable is called with.

    Args:
        leaves: The tensors and the other arguments of a call.
        form: Their nesting.
        device: Device of the tensors.
    """

    def __init__(self, leaves: Sequence[Any], form: TreeSpec, device: torch.device) -> None:
        self.device = device
        self._form = form
        with torch.inference_mode(mode=False), torch.no_grad():
            self.leaves = [
                torch.empty_like(x, device=device).requires_grad_(x.requires_grad)
                if isinstance(x, Tensor)
                else x
                for x in leaves
            ]

    def misfit(self, leaves: Sequence[Any], form: TreeSpec) -> str | None:
        """Say what the arguments of a call do not fit; None if they do."""
        if form != self._form:
            return f"arguments are {form}, and were {self._form} at first; make a graph for each"
        for index, (own, new) in enumerate(zip(self.leaves, leaves, strict=True)):
            if isinstance(own, Tensor) != isinstance(new, Tensor):
                return f"argument {index} is {_kind(new)}, and was {_kind(own)} at first"
            if isinstance(own, Tensor):
                before = tuple(own.shape), own.dtype, own.requires_grad
                now = tuple(new.shape), new.dtype, new.requires_grad
                if before != now:
                    return (
                        f"argument {index} has shape, dtype and requires_grad {now}, and had "
                        f"{before} at first; pad it, or make a graph for each"
                    )
            elif own is not new and own != new:
                return (
                    f"argument {index} is {new!r}, and was {own!r} at first: a value of Python is "
                    "baked into a graph; give what changes as a tensor"
                )
        return None

    @torch.no_grad()
    def take(self, leaves: Sequence[Any]) -> None:
        """Copy the tensors of a call, except those already in place."""
        for own, new in zip(self.leaves, leaves, strict=True):
            if isinstance(own, Tensor) and own.data_ptr() != new.data_ptr():
                own.copy_(new, non_blocking=True)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the static tensors as the callable's arguments."""
        return tree_unflatten(self.leaves, self._form)

    def names(self) -> dict[int, str]:
        """Names by address."""
        tensors = ((i, x) for i, x in enumerate(self.leaves) if isinstance(x, Tensor))
        return {x.data_ptr(): f"argument {index}" for index, x in tensors if x.numel()}


def _kind(x: Any) -> str:
    return "a tensor" if isinstance(x, Tensor) else f"no tensor ({x!r:.40})"
