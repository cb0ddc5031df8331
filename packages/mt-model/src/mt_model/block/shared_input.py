"""Which linear layers multiply the same input, and what makes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from mt_tensor_parallel import ColumnParallelLinear
from torch import Tensor, nn

LINEAR = nn.Linear | ColumnParallelLinear


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedInput:
    """Linear layers that multiply the same input, proportional to the weight of what makes it.

    A scale for each feature of the input can so be moved between them, as mt-quant does.

    Attributes:
        layers: All that multiply the input.
        source: A norm, or a linear layer.
        rows: Which output of a linear source makes each feature, by index in the whole weight;
            None: one after the other.
        offset: What a norm adds to its weight.

    Shape:
        rows: int64 [in].
    """

    layers: tuple[nn.Module, ...]
    source: nn.Module
    rows: Tensor | None = None
    offset: float = 0.0


@runtime_checkable
class ReadsByLinears(Protocol):
    """A mixer or feed-forward whose input nothing but linear layers read."""

    def readers(self) -> tuple[nn.Module, ...]:
        """Return the linear layers that multiply the input."""
        ...


@runtime_checkable
class SharesInputs(Protocol):
    """A mixer or feed-forward with inputs inside that are proportional to a weight."""

    def shared_inputs(self) -> Iterator[SharedInput]:
        """Yield them."""
        ...


def behind_norm(norm: nn.Module | None, *branches: nn.Module | None) -> Iterator[SharedInput]:
    """Yield the input that a norm makes for linear layers, if nothing else reads it.

    Args:
        norm: Has a weight, or there is no such input.
        branches: All that read it: linear layers, or mixers and feed-forwards.
    """
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
