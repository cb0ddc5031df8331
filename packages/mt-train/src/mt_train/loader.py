"""Micro-batches that are ready when a step begins."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from mt_data import BatchSampler, MicroBatch


class Loader:
    """Reads the next step's micro-batches on a thread while the current step computes.

    Args:
        sampler: Gives the micro-batches of any step.
        steps: Steps of the run; nothing after them is read.
    """

    def __init__(self, sampler: BatchSampler, *, steps: int) -> None:
        self.sampler, self._steps = sampler, steps
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mt-train-loader")
        self._next: tuple[int, Future[list[MicroBatch]]] | None = None

    def step(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, counted from 0, and begin to read the next."""
        ready, self._next = self._next, None
        batches = ready[1].result() if ready and ready[0] == step else self.sampler.step(step)
        if step + 1 < self._steps:
            self._next = (step + 1, self._pool.submit(self.sampler.step, step + 1))
        return batches
