"""Answers of the engine as HTTP sends them: whole, or in events as they come."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Protocol

from mt_files import to_plain
from mt_tokenizer import Tokenizer
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mt_infer.completion import Completion, Delta
from mt_infer.forms.choosing import Choosing
from mt_infer.receipts import Receipt, answered, versions
from mt_infer.server.prompts import Prompt
from mt_infer.server.refusal import RefusedError
from mt_infer.server.serving import Ask, Serving, until_gone

_COMPACT = (",", ":")
_LEAST_LOGPROB = -9999.0  # JSON has no infinity


class Writer(ABC):
    """What makes the body of an answer, whole or in chunks.

    Args:
        serving: The server's.
        form: The fields of the request.
        prompts: The prompts.
        ask: What the engine was asked.

    Attributes:
        kind: Name of the body of a whole answer.
        chunk_kind: Name of the body of a chunk.
        prefix: Beginning of the answer's id.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(
        self, serving: Serving, form: Choosing, prompts: Sequence[Prompt], ask: Ask
    ) -> None:
        self.serving, self.prompts, self.ask = serving, prompts, ask
        self.form, self.ended = form, dict[int, Completion]()
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.model = form.model or serving.facts.model
        self._fingerprints: dict[int | None, str] = {}

    @abstractmethod
    def choice(self, index: int, found: Completion) -> dict[str, Any]:
        """Return a whole choice."""

    @abstractmethod
    def parts(self, delta: Delta) -> Iterable[dict[str, Any]]:
        """Return the choices of the chunks of a delta."""

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of a whole answer."""
        self.ended = dict(enumerate(completions))
        choices = [self.choice(*each) for each in self.ended.items()]
        return {**self._head(self.kind, completions[0].step), "choices": choices, **self.ending()}

    def chunks(self, delta: Delta) -> Iterable[dict[str, Any]]:
        """Return the chunks of a delta."""
        if delta.completion is not None:
            self.ended[delta.index] = delta.completion
        usage = {"usage": None} if self.form.stream_options.include_usage else {}
        for part in self.parts(delta):
            yield {**self._head(self.chunk_kind, delta.step), "choices": [part], **usage}

    def last_chunks(self) -> Iterable[dict[str, Any]]:
        """Return the chunks behind the deltas."""
        ending = self.ending()
        if not self.form.stream_options.include_usage:
            del ending["usage"]
        if ending:
            yield {**self._head(self.chunk_kind, self.ended[0].step), "choices": [], **ending}

    def ending(self) -> dict[str, Any]:
        """Return the numbers of tokens, and the receipt if it is wanted."""
        found: dict[str, Any] = {"usage": usage_of(self.prompts, self.ended)}
        if self.form.receipt:
            found["receipt"] = to_plain(self._receipt())
        return found

    def _receipt(self) -> Receipt:
        facts, tokenizer = self.serving.facts, self.serving.backend.tokenizer
        step = self.ended[0].step
        return Receipt(
            model=facts.model,
            step=step,
            weights=facts.digests[step],
            tokenizer=None if tokenizer is None else tokenizer.sha256,
            dtype=facts.dtype,
            layout=facts.layout,
            kernels=facts.kernels,
            versions=versions(),
            prompts=tuple(map(tuple, self.ask.prompts)),
            sampling=self.ask.sampling,
            answers=answered([self.ended[index] for index in sorted(self.ended)]),
        )

    def _head(self, kind: str, step: int | None) -> dict[str, Any]:
        if step not in self._fingerprints:
            self._fingerprints[step] = self.serving.facts.fingerprint(step)
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self._fingerprints[step],
        }


class EventWriter(Protocol):
    """What turns deltas into events."""

    def chunks(self, delta: Delta) -> Iterable[Mapping[str, Any]]:
        """Return the events of a delta."""
        ...

    def last_chunks(self) -> Iterable[Mapping[str, Any]]:
        """Return the events behind the deltas."""
        ...


async def streamed(
    request: Request, ask: Ask, writer: EventWriter, *, named: bool = False
) -> Response:
    """Return an answer in events.

    Args:
        request: The request.
        ask: What the engine is asked.
        writer: Makes the events.
        named: Whether each event begins with its `type` as a name; such a stream has no `[DONE]`.

    Raises:
        RefusedError: The engine refuses before the first delta; later errors are events.
    """
    deltas = Serving.of(request).deltas(request, ask)
    first = await until_gone(request, anext(deltas))
    lines = _lines(deltas, first, writer, named=named)
    return StreamingResponse(
        lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


async def _lines(
    deltas: AsyncGenerator[Delta], first: Delta, writer: EventWriter, *, named: bool
) -> AsyncIterator[str]:
    async with aclosing(deltas):
        try:
            yield _events(writer.chunks(first), named=named)
            async for delta in deltas:
                yield _events(writer.chunks(delta), named=named)
            yield _events(writer.last_chunks(), named=named)
        except RefusedError as error:
            yield _events([{"type": "error", **error.body} if named else error.body], named=named)
        if not named:
            yield "data: [DONE]\n\n"


def _events(bodies: Iterable[Mapping[str, Any]], *, named: bool) -> str:
    return "".join(
        (f"event: {body['type']}\n" if named else "")
        + f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False, separators=_COMPACT)}\n\n"
        for body in bodies
    )


def usage_of(prompts: Sequence[Prompt], ended: Mapping[int, Completion]) -> dict[str, int]:
    """Return the numbers of tokens of an answer."""
    read = sum(len(each.tokens) for each in prompts)
    written = sum(len(each.tokens) for each in ended.values())
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of a token, or of its name if it is a special one."""
    return tokenizer.decode_bytes([token]) or tokenizer.decode([token]).encode()


def bounded(logprob: float) -> float:
    """Return a logprob as JSON can have it."""
    return max(logprob, _LEAST_LOGPROB)
