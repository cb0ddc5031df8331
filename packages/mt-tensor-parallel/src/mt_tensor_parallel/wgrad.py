"""Where weight gradients go: computed later than the rest of the backward, or summed in place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Deferral", "GradSink", "WgradStore", "defer"]


class Deferral(Protocol):
    """Takes the computation of weight gradients that can wait."""

    def put(self, compute: Callable[[], None], /) -> None:
        """Have `compute` called later; it adds to a parameter's gradient."""
        ...


class GradSink(Protocol):
    """Where one parameter's gradients are summed; `mt_data_parallel.GradBuffer.sink` gives it."""

    def add(self, write: Callable[[Tensor, bool], None], /) -> None:
        """Have `write(out, accumulate)` put a gradient into `out`: add it, or set it if not."""
        ...


class WgradStore:
    """Computations of weight gradients, put off until `run`.

    Backward then makes the input gradients only, which the pipeline stage before waits for, and the
    weight gradients fill the time in which there is nothing else to do (zero-bubble schedules, Qi
    et al. 2023, or the head's in a pipeline's cool-down). Each gradient is added through autograd,
    so hooks on the parameter fire as usual. Inputs and output gradients are kept until then.

    A weight may be a parameter or a view of one. One that was computed raises ValueError in
    backward, which goes through its computation only once.

    Args:
        limit: Most computations to hold; the oldest runs when one more comes. `None`: no limit.

    Example:
        >>> import torch
        >>> from mt_tensor_parallel import ColumnParallelLinear
        >>> store = WgradStore()
        >>> layer = ColumnParallelLinear(4, 2, wgrad_store=store)
        >>> layer(torch.ones(1, 3, 4)).sum().backward()
        >>> layer.weight.grad is None, len(store)
        (True, 1)
        >>> store.run()
        >>> layer.weight.grad.shape
        torch.Size([2, 4])
    """

    def __init__(self, *, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit} must be at least 1, or None")
        self._limit = limit
        self._waiting: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, compute: Callable[[], None], /) -> None:
        """Have `compute` called later; it adds to a parameter's gradient."""
        self._waiting.append(compute)
        if self._limit is not None and len(self._waiting) > self._limit:
            self.run(1)

    def run(self, count: int | None = None) -> None:
        """Run the oldest `count` computations, or all."""
        for _ in range(len(self._waiting) if count is None else min(count, len(self._waiting))):
            self._waiting.popleft()()


def defer(store: Deferral, weight: Tensor, compute: Callable[[], Tensor]) -> None:
    """Put off the gradient of `weight`, a parameter or a view of one.

    Raises:
        ValueError: `weight` was computed: backward goes through its computation now, once.
    """
    source = weight if weight._base is None else weight._base
    if not source.is_leaf:
        made_by = "" if source.grad_fn is None else f" by {source.grad_fn.name()}"
        raise ValueError(
            f"the gradient of a weight of shape {tuple(weight.shape)} cannot wait in a store: it "
            f"was computed{made_by}, and backward goes through that only once; give the layer a "
            "parameter or a view of one, or no wgrad_store"
        )
    store.put(partial(_accumulate, weight, compute))


def _accumulate(weight: Tensor, compute: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        grad = compute()
    weight.backward(grad.to(weight.dtype))  # which differs under autocast
