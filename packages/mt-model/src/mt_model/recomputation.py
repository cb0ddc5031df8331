"""Which activations of a layer are computed again in backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from mt_tensor_parallel import DiscardedOutput
from torch import Tensor

Output = TypeVar("Output", bound=Tensor | tuple[Tensor, Mapping[str, Tensor]])


def discard_between(
    first: Callable[..., Tensor], second: Callable[[Tensor], Output], *inputs: Tensor
) -> Output:
    """`second(first(*inputs))` that frees the output of `first` and makes it again in backward.

    Args:
        first: cheap, such as a norm or an activation.
        second: keeps its input for backward, as a linear layer does; may return losses too.
        inputs: of `first`.
    """
    return discard_between_all(first, (second,), *inputs)[0]


def discard_between_all(
    first: Callable[..., Tensor], readers: Sequence[Callable[[Tensor], Output]], *inputs: Tensor
) -> list[Output]:
    """`discard_between` with several functions that read the output of `first`."""
    if not torch.is_grad_enabled():
        between = first(*inputs)
        return [reader(between) for reader in readers]
    discarded = DiscardedOutput()
    between = discarded.run(first, *inputs)
    outputs = [reader(between) for reader in readers]
    results: list[Tensor] = []
    for y in outputs:
        results += [y] if isinstance(y, Tensor) else [y[0], *y[1].values()]
    discarded.discard(*results)
    return outputs
