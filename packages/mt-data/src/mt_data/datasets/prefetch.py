"""Batches made ready while the step before is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from mt_data.datasets.batch import BatchSampler, MicroBatch
from mt_data.error import DataError, at_least

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

Prepared = TypeVar("Prepared")


class Prefetcher(Generic[Prepared]):
    """Reads and prepares the steps after the one asked for, on a thread.

    A step is a function of its number, so what is given is the same as without; asking for
    another step than the next one only waits for it. Reading and copying release the interpreter,
    so that the thread does not hold up the one that computes. Use it as a context manager, or
    `close` it.

    Args:
        sampler: Where steps come from.
        prepare: Applied to a step's micro-batches on the thread: makes tensors, pins memory,
            counts labels.
        depth: Steps that are ready or in work at most.
    """

    def __init__(
        self,
        sampler: BatchSampler,
        prepare: Callable[[list[MicroBatch]], Prepared],
        *,
        depth: int = 2,
    ) -> None:
        from concurrent.futures import ThreadPoolExecutor

        at_least(1, depth=depth)
        self.sampler, self.prepare, self.depth = sampler, prepare, depth
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "mt-data prefetch")
        self._ahead: deque[tuple[int, Future[Prepared]]] = deque()

    def __enter__(self) -> Prefetcher[Prepared]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, step: int) -> Prepared:
        """Return what `prepare` made of a step; the following ones are made ready meanwhile.

        Raises:
            IndexError: The sampler has no such step.
        """
        thread = self._thread
        if thread is None:
            raise DataError("the prefetcher is closed")
        while self._ahead and self._ahead[0][0] != step:  # another one is asked for than the next
            self._ahead.popleft()[1].cancel()
        if not self._ahead:
            self._ahead.append((step, thread.submit(self._make, step)))
        _, asked = self._ahead.popleft()
        stop = min(step + 1 + self.depth, len(self.sampler))
        for later in range(step + 1 + len(self._ahead), stop):
            self._ahead.append((later, thread.submit(self._make, later)))
        return asked.result()

    def close(self) -> None:
        """End the thread; what it is at is waited for."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None

    def _make(self, step: int) -> Prepared:
        return self.prepare(self.sampler.step(step))
