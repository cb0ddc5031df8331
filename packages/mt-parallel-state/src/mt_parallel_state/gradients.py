"""Where weight gradients go, between the layers that compute them and those who want them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class GradSink(Protocol):
    """Where one parameter's gradients are summed, in place of autograd.

    Whoever computes a gradient calls `begin`, writes, and calls `end`.
    """

    def begin(self) -> tuple[Tensor, bool]:
        """Return where the gradient goes, and whether to add it there or to replace what is there.

        Shape:
            That of the parameter.
        """
        ...

    def end(self) -> None:
        """Say that the gradient is there."""
        ...


class WgradStore:
    """The switch that has layers leave their weight gradients for later.

    A model's layers are given one store when they are built. Their backward asks it: inside of
    `deferring` it makes the input gradients only, which the pipeline stage before waits for, and
    the weight gradients fill the time in which there is nothing else to do (zero-bubble schedules,
    Qi et al. 2023). Inputs and output gradients are kept until then.

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
        """Whether weight gradients are to be left for later now."""
        return self._queue is not None

    def put(self, compute: Callable[[], None], /) -> None:
        """Have `compute` called later; it adds to a parameter's gradient.

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
            A function that computes what was collected, oldest first, and lets go of each.

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
