"""A kernel of cross entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class LogitKernel(NamedTuple):
    """The functions of a kernel of cross entropy.

    Attributes:
        forward: Returns the terms of each row of logits: log-sum-exp, label's logit and sum.
        backward: Writes the gradient of logits into a tensor, which may be the logits.
        softmax: Returns the same terms, and the probabilities, which may take the memory of the
            logits, so that an immediate gradient needs no second pass. None where there is no such
            form.
    """

    forward: Callable[..., Any]
    backward: Callable[..., None]
    softmax: Callable[..., tuple[Any, Tensor]] | None = None
