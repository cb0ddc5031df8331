"""What a parameter starts from."""

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
    """Values drawn evenly from an interval, of which a function may be taken.

    Every rank makes all values of the parameter and keeps its own, as library functions may round
    an element differently in another place: it is for small parameters.

    Attributes:
        low: Smallest value.
        high: Largest value.
        then: Makes the initial values of those drawn, in fp64.
    """

    low: float
    high: float
    then: Callable[[Tensor], Tensor] | None = None

    @torch.no_grad()
    def fill_(self, param: nn.Parameter, *, key: int, layout: ParallelLayout, rank: int) -> None:
        """Give a rank's part of a parameter its values."""
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
    """Say what a parameter on the meta device starts from; else biases are zeros, others `normal`.

    Args:
        param: Of a module under construction.
        initial: `normal` has the config's `init_std`, `residual`, for what writes to the residual
            stream, `init_std / sqrt(2 * num_layers)` (Radford et al., 2019), and `embedding`, for
            tables and the head, its `embedding_std`; or the interval that values are drawn from.
    """
    setattr(param, _ATTRIBUTE, initial)


def initial_of(name: str, param: nn.Parameter) -> Initial:
    """Return what a parameter of this name starts from: as `start_from` said, or by its name."""
    return getattr(param, _ATTRIBUTE, "zeros" if name.split(".")[-1] == "bias" else "normal")
