"""Recovery from a failed pass: its requests are served one by one, and only failing ones end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mt_infer.engine.request import Request
from mt_infer.engine.scheduler import Scheduler


def isolate(
    scheduler: Scheduler,
    requests: Sequence[Request],
    error: Exception,
    serve: Callable[[], None],
    fail: Callable[[Request, Exception], None],
) -> None:
    """Serve the requests of a failed pass one by one, up to their next token.

    They give their blocks back first, so that nothing of the pass stays. Others wait meanwhile.

    Args:
        scheduler: The scheduler that planned the pass.
        requests: The requests of the pass.
        error: The error of the pass.
        serve: Function that makes a pass of the scheduler's requests.
        fail: Function that ends a request with an error.
    """
    for request in list(scheduler.running):
        scheduler.evict(request)
    others, scheduler.waiting = scheduler.waiting, []
    for request in requests:
        if request.end is None:
            others.remove(request)
            scheduler.waiting = [request]
        problem = error if len(requests) == 1 else _problem(request, error, serve)
        if problem is not None:
            fail(request, problem)
        for each in list(scheduler.running):
            scheduler.evict(each)
        others += scheduler.waiting
        scheduler.waiting = []
    scheduler.waiting = sorted(others, key=lambda each: each.rank)


def _problem(request: Request, error: Exception, serve: Callable[[], None]) -> Exception | None:
    """Serve a request alone up to its next token, and return the error that it raises."""
    if request.end is not None:  # it had ended before the pass failed
        return error
    count = len(request.tokens)
    try:
        while request.end is None and len(request.tokens) == count:
            serve()
    except Exception as own:  # noqa: BLE001 - it is the request's
        return own
    return None
