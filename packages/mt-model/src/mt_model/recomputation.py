"""Which activations of a layer are computed again in backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mt_tensor_parallel import DiscardedOutput
from torch import Tensor


def discard_between(
    first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """`second(first(x))` that frees the output of `first` and makes it again in backward.

    Args:
        first: cheap, such as a norm or an activation.
        second: keeps its input for backward, as a linear layer does.
        x: input of `first`.
    """
    if not torch.is_grad_enabled():
        return second(first(x))
    between = DiscardedOutput()
    y = second(between.run(first, x))
    between.discard(y)
    return y
