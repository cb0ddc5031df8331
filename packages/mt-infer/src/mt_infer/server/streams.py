"""Answers in events, as they come."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mt_infer.answers.writer import Writer
from mt_infer.completion import Delta
from mt_infer.forms.refusal import RefusedError
from mt_infer.prompts.ask import Ask
from mt_infer.server.serving import Serving, until_gone

_COMPACT = (",", ":")
_log = logging.getLogger("mt_infer.server")


async def streamed(request: Request, ask: Ask, writer: Writer) -> Response:
    """Return an answer in events.

    Args:
        request: The request.
        ask: The engine's task.
        writer: Writer of the events.

    Raises:
        RefusedError: The engine refuses before the first delta; later errors are events.
    """
    deltas = Serving.of(request).deltas(request, ask)
    first = await until_gone(request, anext(deltas))
    return StreamingResponse(
        _events(deltas, first, writer),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache"},
    )


async def _events(
    deltas: AsyncGenerator[Delta], first: Delta, writer: Writer
) -> AsyncIterator[str]:
    named = writer.has_named_events
    async with aclosing(deltas):
        try:
            yield _text(writer.chunks(first), named=named)
            async for delta in deltas:
                yield _text(writer.chunks(delta), named=named)
            yield _text(writer.last_chunks(), named=named)
        except RefusedError as error:
            yield _text([_failed(error, named=named)], named=named)
        except Exception as error:  # noqa: BLE001 - the status is sent, so an event says it
            _log.exception("a stream failed", extra={"error": type(error).__name__})
            refused = RefusedError(500, "the server failed", code="internal_error")
            yield _text([_failed(refused, named=named)], named=named)
        if not named:
            yield "data: [DONE]\n\n"


def _failed(error: RefusedError, *, named: bool) -> Mapping[str, Any]:
    return {"type": "error", **error.body} if named else error.body


def _text(bodies: Iterable[Mapping[str, Any]], *, named: bool) -> str:
    return "".join(
        (f"event: {body['type']}\n" if named else "")
        + f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False, separators=_COMPACT)}\n\n"
        for body in bodies
    )
