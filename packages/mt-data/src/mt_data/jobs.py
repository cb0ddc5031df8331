"""Jobs in other processes, of this machine or of a Ray cluster."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Literal, TypeVar

from mt_files import require

from mt_data.error import DataError

T = TypeVar("T")
Where = Literal["processes", "ray"]


def run_jobs(jobs: Sequence[Callable[[], T]], on: Where, *, workers: int, what: str) -> Iterator[T]:
    """Run jobs side by side, and yield the result of each one as it ends.

    Args:
        jobs: Functions that can be pickled, such as methods of a value of plain values.
        on: Place of the jobs: processes of this machine, or the Ray cluster of `RAY_ADDRESS`, or
            without an address Ray on this machine.
        workers: Number of processes; Ray chooses its own number.
        what: Name of the command, for the error that Ray is missing.

    Raises:
        DataError: `workers` is below 1, or the process of a job was killed.
        MissingExtraError: Ray is missing.
    """
    if workers < 1:
        raise DataError(f"--workers is {workers}; it must be at least 1")
    return _on_ray(jobs, what) if on == "ray" else _in_processes(jobs, workers)


def _run(job: Callable[[], T]) -> T:
    return job()


def _in_processes(jobs: Sequence[Callable[[], T]], workers: int) -> Iterator[T]:
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_end_with_parent) as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise _killed() from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _killed() -> DataError:
    return DataError(
        "a process that made a part was killed, perhaps for its memory; the same command goes on "
        "with the parts that are missing"
    )


def _end_with_parent() -> None:
    """End this process when its parent does, and quietly at Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def watch() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _on_ray(jobs: Sequence[Callable[[], T]], what: str) -> Iterator[T]:
    ray = require("ray", what)
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    run = ray.remote(_run)
    waiting = [run.remote(job) for job in jobs]
    while waiting:
        done, waiting = ray.wait(waiting)
        try:
            yield from ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError):
            raise _killed() from None
