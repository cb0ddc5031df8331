"""Linear layers that multiply the same input, and the module before them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mt_tensor_parallel import ColumnParallelLinear
from torch import nn

if TYPE_CHECKING:
    from mt_quant import SharedInput

LINEAR = nn.Linear | ColumnParallelLinear


@runtime_checkable
class ReadsByLinears(Protocol):
    """A mixer or feed-forward whose input only linear layers read."""

    def readers(self) -> tuple[nn.Module, ...]:
        """Return the linear layers that multiply the input."""
        ...


@runtime_checkable
class SharesInputs(Protocol):
    """A mixer or feed-forward with inner inputs proportional to a weight."""

    def shared_inputs(self) -> Iterator[SharedInput]:
        """Yield the inputs inside of the module."""
        ...


def behind_norm(norm: nn.Module | None, *branches: nn.Module | None) -> Iterator[SharedInput]:
    """Yield the input that a norm makes for linear layers, if nothing else reads it.

    Args:
        norm: The norm; without a weight there is no such input.
        branches: All readers: linear layers, or mixers and feed-forwards.
    """
    from mt_quant import SharedInput  # only quantisation needs it

    layers: list[nn.Module] = []
    for branch in branches:
        if isinstance(branch, ReadsByLinears):
            layers += branch.readers()
        elif isinstance(branch, LINEAR):
            layers.append(branch)
        else:
            return
    if norm is not None and getattr(norm, "weight", None) is not None:
        form: Any = getattr(norm, "form", norm)
        yield SharedInput(layers=tuple(layers), source=norm, offset=float(form.zero_centered))
