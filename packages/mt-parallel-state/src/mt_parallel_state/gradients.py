"""Sinks and stores of weight gradients, between layers and the code that consumes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class GradSink(Protocol):
    """A buffer that sums one parameter's gradients instead of autograd.

    The code that computes a gradient calls `begin`, writes the gradient, and calls `end`.
    """

    def begin(self) -> tuple[Tensor, bool]:
        """Return the buffer of the gradient, and whether to add to it or to overwrite it.

        Shape:
            As the parameter.
        """
        ...

    def end(self) -> None:
        """Report that the gradient is written."""
        ...


class WgradStore:
    """A switch with which layers defer their weight gradients.

    A model's layers share one store. Inside `deferring`, their backward makes only the input
    gradients, for which the previous pipeline stage waits. The weight gradients are computed later,
    when the rank would be idle (zero-bubble schedules, Qi et al. 2023); inputs and output gradients
    are kept until then.

    Example:
        >>> store = WgradStore()
        >>> with store.deferring() as compute:
        ...     store.put(lambda: print("gradient"))
        >>> compute()
        gradient
        >>> store.active
        False
    """

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] | None = None

    @property
    def active(self) -> bool:
        """Whether layers defer their weight gradients now."""
        return self._queue is not None

    def put(self, compute: Callable[[], None], /) -> None:
        """Queue `compute`, which adds to a parameter's gradient.

        Raises:
            RuntimeError: The store is not active.
        """
        if self._queue is None:
            raise RuntimeError("put() outside of WgradStore.deferring(): compute the gradient now")
        self._queue.append(compute)

    @contextmanager
    def deferring(self) -> Iterator[Callable[[], None]]:
        """Collect weight gradients inside the block.

        Yields:
            A function that computes the collected gradients, oldest first, and frees their inputs.

        Raises:
            RuntimeError: The store is collecting already.
        """
        if self._queue is not None:
            raise RuntimeError("WgradStore.deferring() inside itself; leave the outer block first")
        queue = self._queue = deque()

        def compute() -> None:
            while queue:
                queue.popleft()()

        try:
            yield compute
        finally:
            self._queue = None
