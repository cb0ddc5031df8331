"""The server's end of the socket to an engine's process: many requests at once, by number."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from mt_infer.backends.backend import EngineDownError, Facts
from mt_infer.backends.wire import error_of, next_message
from mt_infer.completion import Delta
from mt_infer.message import pack

_PING_S = 5.0
_DELTA_BYTES = 64  # bytes of a delta without tokens and text
_log = logging.getLogger("mt_infer.server")


class _Pending:
    """Waiting messages for one request."""

    def __init__(self) -> None:
        self._messages: deque[tuple[dict[str, Any], int]] = deque()
        self.size = 0
        self._has_some = asyncio.Event()

    def put(self, message: dict[str, Any], size: int = 0) -> None:
        self._messages.append((message, size))
        self.size += size
        self._has_some.set()

    async def take(self) -> dict[str, Any]:
        while not self._messages:
            self._has_some.clear()
            await self._has_some.wait()
        message, size = self._messages.popleft()
        self.size -= size
        return message

    def clear(self) -> None:
        self._messages.clear()
        self.size = 0


class Channel:
    """Requests to an engine's process, and its answers.

    Args:
        reader: Messages from the process.
        writer: Messages to the process.
        on_facts: Function to call with the facts in a message.
        max_stream_bytes: Largest number of bytes that may wait for the reader of a stream; with
            more the stream fails.

    Attributes:
        is_open: Whether the process has not ended.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_facts: Callable[[Facts], None],
        max_stream_bytes: int,
    ) -> None:
        self._reader, self._writer, self._on_facts = reader, writer, on_facts
        self._max_stream_bytes, self.is_open = max_stream_bytes, True
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._heard = time.monotonic()

    async def serve(self, silent_s: float) -> None:
        """Distribute messages until the process ends, or is silent for some seconds."""
        pinging = asyncio.create_task(self._ping(silent_s))
        receiving = asyncio.create_task(self._receive())
        try:
            await asyncio.wait({pinging, receiving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.is_open = False
            for each in (pinging, receiving):
                each.cancel()
            await asyncio.gather(pinging, receiving, return_exceptions=True)
            self._writer.close()
            gone = {"kind": "down", "text": "the engine has ended; try again soon"}
            for pending in self._pending.values():
                pending.put({"error": gone})

    async def stream(self, name: str, /, **arguments: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Send a request, and yield its messages to the last one; closing it cancels the request.

        Args:
            name: Name of the call.
            arguments: Its arguments.
        """
        if not self.is_open:
            raise EngineDownError("the engine is not running; try again soon")
        number, pending, has_ended = next(self._numbers), _Pending(), False
        self._pending[number] = pending
        self._send(id=number, do=name, arguments=arguments)
        try:
            while not has_ended:
                found = await pending.take()
                has_ended = "delta" not in found
                if "error" in found:
                    raise error_of(found["error"])
                yield found
        finally:
            del self._pending[number]
            if not has_ended:
                self._send(id=number, do="cancel", arguments={})

    async def call(self, name: str, /, **arguments: Any) -> Any:
        """Send a request, and return its result."""
        async with aclosing(self.stream(name, **arguments)) as messages:
            return (await anext(messages))["done"]

    async def _receive(self) -> None:
        try:
            while (found := await next_message(self._reader)) is not None:
                self._hand_out(found)
        except (EngineDownError, ValueError) as error:
            _log.error("the engine's messages can't be read", extra={"error": str(error)})

    async def _ping(self, silent_s: float) -> None:
        while time.monotonic() - self._heard < silent_s:
            self._send(id=-1, do="stats", arguments={})
            await asyncio.sleep(min(_PING_S, silent_s / 2))
        _log.error("the engine says nothing", extra={"seconds": silent_s})

    def _hand_out(self, message: dict[str, Any]) -> None:
        self._heard = time.monotonic()
        if "facts" in message:
            self._on_facts(message["facts"])
            return
        pending = self._pending.get(message.pop("id"))
        if pending is None:  # its reader is gone
            return
        delta: Delta | None = message.get("delta")
        size = 0 if delta is None else _DELTA_BYTES + len(delta.text) + 8 * len(delta.tokens)
        if pending.size + size > self._max_stream_bytes:
            pending.clear()
            message = {"error": {"kind": "failed", "text": "the stream is read too slowly"}}
        pending.put(message, size)

    def _send(self, **message: Any) -> None:
        if self.is_open:
            self._writer.write(pack(message))
