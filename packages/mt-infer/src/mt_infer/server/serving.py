"""Requests on their way to the engine: admitted within limits, counted, and cancelled."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import fields
from typing import Any, TypeVar

from mt_files import MissingExtraError, UserError
from starlette.requests import Request

from mt_infer.backends.backend import (
    Backend,
    EngineDownError,
    EngineFailedError,
    Facts,
    Pooling,
)
from mt_infer.completion import Completion, Delta
from mt_infer.forms.refusal import RefusedError
from mt_infer.prompts.ask import Ask
from mt_infer.prompts.prompt import Prompt, Prompts
from mt_infer.sampling import Sampling
from mt_infer.server.keys import Client
from mt_infer.server.limits import Limits
from mt_infer.server.metrics import Metrics
from mt_infer.service import Service

T = TypeVar("T")
_RETRY_S = 1
_FIELDS = frozenset(each.name for each in fields(Sampling))


class Serving:
    """The engine with limits and metrics, for routes; it is `request.app.state.serving`.

    Args:
        backend: The engine.
        limits: The limits.

    Attributes:
        metrics: The server's metrics.
        prompts: Converter of prompts to tokens.
        is_draining: Whether no more requests are taken.
    """

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self.backend, self.limits, self.metrics = backend, limits, Metrics()
        self.prompts = Prompts(backend, limits.max_prompt_bytes)
        self.is_draining = False
        self._continuations = self._tokens = 0

    @classmethod
    def of(cls, request: Request) -> Serving:
        """Return the serving of a request's app."""
        return request.app.state.serving

    @property
    def facts(self) -> Facts:
        """The model and its engine."""
        return self.backend.facts

    async def deltas(self, request: Request, ask: Ask) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of continuations; closing it, or a leaving client, cancels them.

        Raises:
            RefusedError: The engine refuses or fails, or the queue is full.
        """
        client: Client = request.scope["state"]["client"]
        begun, seen = time.monotonic(), dict[int, float]()
        deadline = min(self.limits.deadline_s, ask.deadline_s or self.limits.deadline_s)
        caller = _caller(client.name, ask.cache_salt)
        service = Service(priority=client.priority, deadline_s=deadline, caller=caller)
        with self._admitted(ask), refusals():
            stream = self.backend.stream(ask.job(service))
            async with aclosing(stream):
                async for delta in stream:
                    self._count(delta, begun, seen)
                    yield delta
        self.metrics.prompt_tokens.inc(ask.num_prompt_tokens)
        self.metrics.whole_s.observe(time.monotonic() - begun)

    async def completions(self, request: Request, ask: Ask) -> list[Completion]:
        """Return the whole continuations, in order; a client that leaves cancels them."""
        return await until_gone(request, self._gathered(request, ask))

    async def vectors(
        self, request: Request, prompts: Sequence[Prompt], pooling: Pooling = "last"
    ) -> list[list[float]]:
        """Return the embedding of each prompt."""
        ask = Ask(prompts=prompts, sampling=Sampling(max_tokens=0))
        with self._admitted(ask), refusals():
            found = await until_gone(request, self.backend.embed(ask.tokens, pooling))
        self.metrics.prompt_tokens.inc(ask.num_prompt_tokens)
        return found

    async def _gathered(self, request: Request, ask: Ask) -> list[Completion]:
        found: dict[int, Completion] = {}
        async with aclosing(self.deltas(request, ask)) as deltas:
            async for delta in deltas:
                if delta.completion is not None:
                    found[delta.index] = delta.completion
        return [found[index] for index in sorted(found)]

    @contextmanager
    def _admitted(self, ask: Ask) -> Iterator[None]:
        """Count an ask's continuations and tokens while they are served, within the limits."""
        limits, count, tokens = self.limits, ask.num_continuations, ask.max_num_tokens
        if self.is_draining or not self.backend.is_ready:
            self._reject("not_ready")
            raise RefusedError(
                503, "the server is not ready", code="not_ready", retry_after=_RETRY_S
            )
        room = self.facts.max_batch + limits.max_queue
        if count > room or tokens > limits.max_queue_tokens:
            raise RefusedError(
                400,
                f"the request has {count} continuations of up to {tokens} tokens in all; at most "
                f"{room} and {limits.max_queue_tokens} are served",
            )
        is_full = self._continuations + count > room
        if is_full or self._tokens + tokens > limits.max_queue_tokens:
            self._reject("queue_full")
            raise RefusedError(
                429, "the queue is full; try again later", code="queue_full", retry_after=_RETRY_S
            )
        self._continuations += count
        self._tokens += tokens
        try:
            yield
        finally:
            self._continuations -= count
            self._tokens -= tokens

    def _reject(self, reason: str) -> None:
        self.metrics.rejected.labels(reason).inc()

    def _count(self, delta: Delta, begun: float, seen: dict[int, float]) -> None:
        now, metrics = time.monotonic(), self.metrics
        if delta.tokens:
            last = seen.get(delta.index)
            which = metrics.first_s if last is None else metrics.next_s
            which.observe(now - (begun if last is None else last))
            seen[delta.index] = now
            metrics.generation_tokens.inc(len(delta.tokens))
        if delta.completion is not None:
            metrics.ended.labels(delta.completion.end).inc()


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine; cancel the coroutine when the client leaves."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RefusedError(499, "the client has left", code="client_left")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _caller(client: str, salt: str) -> str:
    """Return the owner of cached blocks: the client, narrowed by its salt."""
    if not salt:
        return client
    return f"{client}/{hashlib.sha256(salt.encode(errors='surrogatepass')).hexdigest()}"


@contextmanager
def refusals() -> Iterator[None]:
    """Turn the engine's errors into refusals."""
    try:
        yield
    except EngineDownError as error:
        raise RefusedError(503, str(error), code="engine_down", retry_after=_RETRY_S) from error
    except EngineFailedError as error:
        raise RefusedError(500, str(error), code="engine_failed") from error
    except (ValueError, UserError, MissingExtraError) as error:
        name = str(error).partition(":")[0]
        param = name if name in _FIELDS else None
        raise RefusedError(400, str(error), param=param, code="invalid_value") from error
