"""Initial values of single parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from mt_parallel_state import ParallelLayout, global_shape_of, offsets_of, random_uniform
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Values drawn evenly from an interval, optionally mapped by a function.

    Every rank makes all values of the parameter and keeps its own, since library functions may
    round an element differently at another index. This is for small parameters.

    Attributes:
        low: Smallest value.
        high: Largest value.
        then: Function from the drawn to the initial values, in fp64; None keeps them.
    """

    low: float
    high: float
    then: Callable[[Tensor], Tensor] | None = None

    @torch.no_grad()
    def fill_(self, param: nn.Parameter, *, key: int, layout: ParallelLayout, rank: int) -> None:
        """Fill a rank's part of a parameter."""
        shape = global_shape_of(param, layout)
        index = torch.arange(math.prod(shape))
        values = random_uniform(key, index, dtype=torch.float64)
        values = self.low + (self.high - self.low) * values
        values = (values if self.then is None else self.then(values)).view(shape)
        for dim, (start, size) in enumerate(
            zip(offsets_of(param, layout, rank), param.shape, strict=True)
        ):
            values = values.narrow(dim, start, size)
        param.copy_(values)


Initial: TypeAlias = Literal["normal", "residual", "embedding", "ones", "zeros"] | Uniform
_ATTRIBUTE = "_mt_initial"


def start_from(param: nn.Parameter, initial: Initial) -> None:
    """Record how a parameter on the meta device starts; by default biases are zeros, others normal.

    Args:
        param: Parameter of a module under construction.
        initial: `normal` with the config's `init_std`; `residual`, for projections that write to
            the residual stream, with `init_std / sqrt(2 * num_layers)` (Radford et al., 2019);
            `embedding`, for tables and the head, with its `embedding_std`; or a `Uniform`.
    """
    setattr(param, _ATTRIBUTE, initial)


def initial_of(name: str, param: nn.Parameter) -> Initial:
    """Return how a parameter starts: as `start_from` recorded, or by its name."""
    return getattr(param, _ATTRIBUTE, "zeros" if name.split(".")[-1] == "bias" else "normal")
