"""Preparation of batches while the previous step is computed."""

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
    """Read and prepare the next steps on a thread.

    A step is a function of its number, so the results are the same as without prefetching; a step
    out of order only has to be waited for. Reading and copying release the interpreter, so the
    thread does not hold up the computation. Use it as a context manager, or call `close`.

    Args:
        sampler: The source of steps.
        prepare: Function of a step's micro-batches, called on the thread: it makes tensors, pins
            memory, counts labels.
        depth: Largest number of steps ready or in progress.
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
        """Return the prepared step; the thread prepares the following steps meanwhile.

        Raises:
            IndexError: The sampler has no such step.
        """
        thread = self._thread
        if thread is None:
            raise DataError("the prefetcher is closed")
        while self._ahead and self._ahead[0][0] != step:  # not the expected next step
            self._ahead.popleft()[1].cancel()
        if not self._ahead:
            self._ahead.append((step, thread.submit(self._make, step)))
        _, asked = self._ahead.popleft()
        stop = min(step + 1 + self.depth, len(self.sampler))
        for later in range(step + 1 + len(self._ahead), stop):
            self._ahead.append((later, thread.submit(self._make, later)))
        return asked.result()

    def close(self) -> None:
        """End the thread, after the step in progress."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None

    def _make(self, step: int) -> Prepared:
        return self.prepare(self.sampler.step(step))
