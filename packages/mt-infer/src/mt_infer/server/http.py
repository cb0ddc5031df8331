"""The port: connections within limits, signals, and the line with the server's address."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from mt_files import UserError
from uvicorn.protocols.http.h11_impl import H11Protocol

from mt_infer.forms.refusal import RefusedError
from mt_infer.server.keys import Keys
from mt_infer.server.limits import Limits

_HEADER_BYTES = 1 << 15
_BACKLOG = 2048
_OTHER_FILES = 256
_PAUSE_S = 1.0  # after a failure to accept a connection
_log = logging.getLogger("mt_infer.server")


class AddressError(UserError):
    """An address on which nothing can listen."""


def check_address(host: str, keys: Keys) -> None:
    """Refuse to serve other machines without a key.

    Raises:
        ValueError: Other machines can reach the address, and there is no key.
    """
    if keys.clients or host == "localhost":
        return
    try:
        is_own = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_own = False
    if not is_own:
        raise ValueError(
            f"--host {host}: other machines could send requests without a key; give --api-key-file "
            "or set MT_INFER_API_KEY, or leave --host out"
        )


def bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address, which does not listen yet.

    Raises:
        AddressError: The address is taken, or is no address.
    """
    made = None
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        if made is not None:
            made.close()
        raise AddressError(f"{host}:{port}: {error}; use another --host or --port") from error
    return made


class Server(uvicorn.Server):
    """A server of an app on a bound socket, until SIGTERM or SIGINT; a second one does not wait.

    Args:
        app: The app.
        limits: The limits.
        on_listening: Function to call when the port is open.
    """

    def __init__(self, app: FastAPI, limits: Limits, on_listening: Callable[[], None]) -> None:
        self._most, self._open = limits.max_connections, set[asyncio.Protocol]()
        self._opening, self._refusal = set[asyncio.Task[Any]](), _refusal()
        self._connection = _connections(limits, self._open.discard)
        config = uvicorn.Config(
            app,
            http=self._connection,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=max(1, round(limits.idle_s)),
            timeout_graceful_shutdown=max(1, round(limits.drain_s)),
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        super().__init__(config)
        self._serving, self._on_listening = app.state.serving, on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 2 * self._most + _OTHER_FILES
        if 0 <= soft < wanted:
            most = wanted if hard < 0 else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        await super().startup(sockets)
        for listener in sockets or ():
            self._listen(listener)
        self._on_listening()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at a signal, and end with 0: this process has no torch, whose C++ would hold it."""
        is_main = threading.current_thread() is threading.main_thread()
        caught = (signal.SIGTERM, signal.SIGINT) if is_main else ()
        loop = asyncio.get_running_loop()
        for each in caught:
            loop.add_signal_handler(each, self._stop)
        try:
            yield
        finally:
            for each in caught:
                loop.remove_signal_handler(each)

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:  # it is not closed
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Take the waiting connections; one beyond the limit costs no protocol and no task."""
        loop = asyncio.get_running_loop()
        for _ in range(_BACKLOG):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # such as no more files
                _log.error("connections are not accepted", extra={"error": str(error)})
                loop.remove_reader(listener)
                loop.call_later(_PAUSE_S, self._listen, listener)
                return
            connection.setblocking(False)  # noqa: FBT003
            if len(self._open) >= self._most:
                self._serving.metrics.rejected.labels("too_many").inc()
                with connection, suppress(OSError):
                    connection.send(self._refusal)
                    connection.recv(_HEADER_BYTES)  # closed with unread bytes, it would be reset
                continue
            protocol = self._connection(self.config, self.server_state, self.lifespan.state)
            self._open.add(protocol)
            opening = loop.create_task(self._opened(protocol, connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _opened(self, protocol: asyncio.Protocol, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: protocol, connection)
        except OSError:  # the client has left
            self._open.discard(protocol)
            connection.close()

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = self._serving.is_draining = True


def _refusal() -> bytes:
    """Return the answer to a connection beyond the limit."""
    busy = json.dumps(RefusedError(503, "too many connections", code="too_many").body).encode()
    head = f"HTTP/1.1 503 Busy\r\ncontent-type: application/json\r\ncontent-length: {len(busy)}\r\n"
    return f"{head}retry-after: 1\r\nconnection: close\r\n\r\n".encode() + busy


def _connections(limits: Limits, on_lost: Callable[[asyncio.Protocol], None]) -> type[H11Protocol]:
    """Return uvicorn's protocol with a limit on a header's time.

    Args:
        limits: The limits.
        on_lost: Function to call with an ended connection.
    """

    class Connection(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._forget()
            on_lost(self)

        def _watch(self) -> None:
            """Close the connection if its header takes too long after the first byte."""
            if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
                self._forget()
            elif self._late is None:
                self._late = self.loop.call_later(limits.header_s, self.transport.abort)

        def _forget(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Connection
