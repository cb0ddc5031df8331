"""Many tasks in a few threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_threads(action: Callable[[T], R], items: Iterable[T], *, threads: int) -> Iterator[R]:
    """Yield the result of `action` for each item, in order.

    Items are taken as threads become free, so that few of them are in memory. The first error ends
    the work: items that no thread has begun are dropped.

    Args:
        action: What each thread does with an item.
        items: The items.
        threads: Number of threads, and of items that are under way.
    """
    pending: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            if len(pending) >= 2 * threads:
                yield pending.popleft().result()
            pending.append(pool.submit(action, item))
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
