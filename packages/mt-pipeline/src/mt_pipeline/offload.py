"""Keeps what a forward leaves for its backward in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True, slots=True)
class OnHost:
    """A tensor that waits in host memory.

    Attributes:
        tensor: Its values; pinned where the device is a GPU.
        device: Where it belongs.
    """

    tensor: Tensor
    device: torch.device

    def back(self) -> Tensor:
        """A copy where it belongs; the device's later work waits for it."""
        return self.tensor.to(self.device, non_blocking=self.tensor.is_pinned())


def to_host(tensor: Tensor) -> OnHost:
    """Copy a tensor into host memory, and wait for that."""
    if tensor.device.type != "cuda" or tensor.layout is not torch.strided:
        return OnHost(tensor.cpu(), tensor.device)
    room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return OnHost(room.copy_(tensor), tensor.device)


def offloading(*functions: object) -> AbstractContextManager[Any]:
    """Put what autograd saves inside the block into host memory, until a backward needs it.

    Weights stay where they are: they are there all the time, so a copy would free nothing. They
    are the parameters and buffers of what is called in the block, if that is a module or a method
    of one, or of the modules that it closes over or has as defaults, if it is a function.
    """
    weights = {_memory(weight) for function in functions for weight in _weights(function)}

    def pack(tensor: Tensor) -> Tensor | OnHost:
        return tensor if _memory(tensor) in weights else to_host(tensor)

    def unpack(packed: Tensor | OnHost) -> Tensor:
        return packed.back() if isinstance(packed, OnHost) else packed

    return saved_tensors_hooks(pack, unpack)


def _weights(function: object) -> Iterator[Tensor]:
    held = [function, getattr(function, "__self__", None)]
    held += getattr(function, "__defaults__", None) or ()
    held += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for each in held:
        for one in each if isinstance(each, list | tuple) else [each]:
            if isinstance(one, nn.Module):
                yield from one.parameters()
                yield from one.buffers()
            elif isinstance(one, Tensor):
                yield one


def _memory(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
    return local.untyped_storage().data_ptr() if local.layout is torch.strided else id(tensor)


def entrance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Begin a graph at x without keeping x, as a leaf would.

    Returns:
        A leaf of x's shape and without memory, which gets the gradient; and x in its graph.
    """
    leaf = x.new_empty(()).expand(x.shape).requires_grad_()
    return leaf, _Entrance.apply(leaf, x)


class _Entrance(torch.autograd.Function):
    """Gives its second argument, and the gradient to its first."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None
