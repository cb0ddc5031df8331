"""Batches made ready while the step before is computed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from mt_data.batch import MicroBatch
from mt_data.error import DataError

Prepared = TypeVar("Prepared")


class Steps(Protocol):
    """Gives the micro-batches of any step; `BatchSampler` is one."""

    def __len__(self) -> int: ...

    def step(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step."""
        ...


class Prefetcher(Generic[Prepared]):
    """Reads and prepares the steps after the one asked for, on a thread.

    A step is a function of its number, so what is given is the same as without; asking for
    another step than the next one only waits for it. Reading and copying release the interpreter,
    so that the thread does not hold up the one that computes. Use it as a context manager, or
    `close` it.

    Args:
        sampler: Where steps come from.
        prepare: Applied to a step's micro-batches on the thread: makes tensors, pins memory,
            starts copies to a device, counts labels.
        depth: Steps that are ready or in work at most.
    """

    def __init__(
        self,
        sampler: Steps,
        prepare: Callable[[list[MicroBatch]], Prepared],
        *,
        depth: int = 2,
    ) -> None:
        if depth < 1:
            raise DataError(f"depth is {depth}; it must be at least 1")
        self.sampler, self.prepare, self.depth = sampler, prepare, depth
        self._ready: deque[tuple[int, Prepared | None, BaseException | None]] = deque()
        self._changed = threading.Condition()
        self._next: int | None = None  # the step the thread works on; None while there is none
        self._closed = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Prefetcher[Prepared]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, step: int) -> Prepared:
        """Return what `prepare` made of a step; the following ones are made ready meanwhile.

        Raises:
            IndexError: The sampler has no such step.
        """
        with self._changed:
            if self._closed:
                raise DataError("the prefetcher is closed")
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="mt-data prefetch", daemon=True
                )
                self._thread.start()
            while self._ready and self._ready[0][0] != step:
                self._ready.popleft()  # asked for another one: what is ready is of no use
            if not self._ready and self._next != step:
                self._next = step
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._ready) or self._closed)
            if self._closed:
                raise DataError("the prefetcher is closed")
            _, prepared, error = self._ready.popleft()
            self._changed.notify_all()
        if error is not None:
            raise error
        return prepared  # type: ignore[return-value] - there is no error, so there is a value

    def close(self) -> None:
        """End the thread; what it is at is waited for."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._closed or (self._next is not None and len(self._ready) < self.depth)
                    )
                )
                step = self._next
                if self._closed or step is None:
                    return
            prepared, error = None, None
            try:
                prepared = self.prepare(self.sampler.step(step))
            except BaseException as caught:  # noqa: BLE001 - raised by `step`, in its thread
                error = caught
            with self._changed:
                if self._next == step:  # else another step was asked for meanwhile
                    self._ready.append((step, prepared, error))
                    more = error is None and step + 1 < len(self.sampler)
                    self._next = step + 1 if more else None
                self._changed.notify_all()
