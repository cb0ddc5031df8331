"""Which activations of a layer are computed again in backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    if not torch.is_grad_enabled():
        return second(first(*inputs))
    between = DiscardedOutput()
    y = second(between.run(first, *inputs))
    if isinstance(y, Tensor):
        between.discard(y)
    else:
        between.discard(y[0], *y[1].values())
    return y
