"""Checks of each request before routing: its key, and the size and time of its body."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mt_infer.forms.refusal import RefusedError
from mt_infer.server.keys import Client, Keys
from mt_infer.server.limits import Limits

_OPEN = "/health"  # says only that the process is alive
_ADMIN = "/admin"
_OWN = ("localhost", "127.0.0.1", "::1")
_LONGEST_PATH = 200
_log = logging.getLogger("mt_infer.server")


class Gate:
    """The outermost layer of the app.

    Each request needs a client's key, `/admin` an admin's key, and `/health` no key, whether the
    route exists or not. A refusal, or an uncaught error of an inner layer, is answered in OpenAI's
    form, and one line of the log records the end of each request.

    Args:
        app: The app.
        keys: The keys.
        limits: The limits.
    """

    def __init__(self, app: ASGIApp, keys: Keys, limits: Limits) -> None:
        self._app, self._keys, self._limits = app, keys, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._limits)
        try:
            scope.setdefault("state", {})["client"] = self._client(scope)
            exchange.check_length()
            await self._app(scope, exchange.receive, exchange.send)
        except RefusedError as error:
            await exchange.refuse(error)
        except asyncio.CancelledError:  # the time of a drain is over
            await exchange.refuse(RefusedError(503, "the server ends; ask another one"))
            raise
        except Exception as error:  # noqa: BLE001 - one request's error ends no other
            _log.exception("a request failed", extra={"error": type(error).__name__})
            await exchange.refuse(RefusedError(500, "the server failed", code="internal_error"))
        finally:
            client = scope.get("state", {}).get("client") or Client()
            exchange.log(client.name)

    def _client(self, scope: Scope) -> Client:
        path = scope["path"]
        if path == _OPEN:
            return Client()
        given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        if path == _ADMIN or path.startswith(f"{_ADMIN}/"):
            client = self._keys.admin(given)
            if not self._keys.admins:
                raise RefusedError(404, "start the server with an admin key for /admin")
        else:
            client = self._keys.client(given)
        if not self._keys.clients and not _is_own(scope):
            raise RefusedError(403, "a page of another site may not use a server without keys")
        if client is None:
            raise RefusedError(
                401, "send a valid key: Authorization: Bearer KEY", code="invalid_api_key"
            )
        return client


class _Exchange:
    """A request and its answer, within limits of size and time."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self._scope, self._receive, self._send, self._limits = scope, receive, send, limits
        self._begun = time.monotonic()
        self._size, self._is_whole, self._status = 0, False, 0

    def check_length(self) -> None:
        """Refuse a body by its declared length, before it is read."""
        length = dict(self._scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._limits.max_body_bytes:
            raise self._too_large()

    async def receive(self) -> Message:
        """Return the next part of the body, or the client's disconnection."""
        if self._is_whole:
            return await self._receive()
        left = self._begun + self._limits.body_s - time.monotonic()
        try:
            async with asyncio.timeout(left):
                message = await self._receive()
        except TimeoutError as error:
            text = f"the body has taken more than {self._limits.body_s:g} s"
            raise RefusedError(408, text) from error
        if message["type"] == "http.disconnect":
            raise RefusedError(499, "the client has left", code="client_left")
        self._size += len(message.get("body", b""))
        if self._size > self._limits.max_body_bytes:
            raise self._too_large()
        self._is_whole = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer; disconnect a client that does not take it."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if not self._is_whole and self._has_body():  # the rest of it is not read
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        try:
            async with asyncio.timeout(self._limits.send_s):
                await self._send(message)
        except TimeoutError as error:
            raise ConnectionError("the client reads too slowly") from error

    async def refuse(self, error: RefusedError) -> None:
        """Send a refusal, unless the answer has begun or the client has left."""
        if self._status:
            return  # an answer that has begun and not ended closes the connection
        with suppress(ConnectionError):
            await response_of(error)(self._scope, self.receive, self.send)

    def log(self, client: str) -> None:
        """Log the end of the request."""
        how: dict[str, Any] = {
            "method": self._scope["method"],
            "path": self._scope["path"][:_LONGEST_PATH],
            "status": self._status,
            "seconds": round(time.monotonic() - self._begun, 4),
            "client": client,
        }
        _log.info("request", extra=how)

    def _has_body(self) -> bool:
        headers = dict(self._scope["headers"])
        return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers

    def _too_large(self) -> RefusedError:
        most = self._limits.max_body_bytes
        return RefusedError(413, f"the body has more than {most} bytes", code="body_too_large")


def _is_own(scope: Scope) -> bool:
    """Return whether the request does not come from a browser's page of another site."""
    origin = dict(scope["headers"]).get(b"origin", b"http://localhost").decode("latin-1")
    return urlsplit(origin).hostname in _OWN


def response_of(error: RefusedError) -> Response:
    """Return the answer to a refused request."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body, error.status, headers)
