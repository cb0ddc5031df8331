"""An object store on loopback, whose answers may get lost."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from mt_files import require

_SERVER = """
import sys
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until the tests end
"""
FAULTS = ("error", "refuse", "cut", "drop")


class UnsteadyStore(ThreadingHTTPServer):
    """A proxy of a store that fails some of its requests.

    Attributes:
        fault: Function that returns for a request's method and path how it fails; None if it
            doesn't. `error`: it is carried out, and the answer is an error. `refuse`: it is not
            carried out. `cut`: half of the answer's body comes. `drop`: it is carried out, and no
            answer comes.
        requests: Method and path of each request so far.
        faults: Number of requests that failed.
        sent: Number of bytes in the bodies of its answers so far.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = port
        self.fault: Callable[[str, str], str | None] | None = None
        self.requests: list[tuple[str, str]] = []
        self.faults = self.sent = 0
        self.turn = threading.Lock()

    @property
    def variables(self) -> dict[str, str]:
        """The variables of the environment with which clients find the store as `s3://bucket`."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def fail_some(self, share: float, *, seed: int) -> None:
        """Let a share of the requests fail, each in a drawn way."""
        draw = random.Random(seed)  # noqa: S311 - repeatable faults
        self.fault = lambda *_: draw.choice(FAULTS) if draw.random() < share else None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have disconnected, such as killed ones."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        server = cast("UnsteadyStore", self.server)
        body = self.rfile.read(int(self.headers.get("content-length") or 0)) or None
        server.requests.append((self.command, self.path))
        fault = server.fault(self.command, self.path) if server.fault else None
        server.faults += fault is not None
        if fault == "refuse":
            self._fail()
            return
        upstream = http.client.HTTPConnection("127.0.0.1", server.behind)
        # A store decides about conditions atomically, which moto leaves to one request at a time.
        with server.turn if self.command != "GET" else contextlib.nullcontext():
            upstream.request(self.command, self.path, body, dict(self.headers))
            reply = upstream.getresponse()
            content = reply.read()
        upstream.close()
        if fault == "error":
            self._fail()
        elif fault == "drop":
            self.close_connection = True
        else:
            self._pass_on(reply, content, cut=fault == "cut")

    def _fail(self) -> None:
        self.send_response(503)
        self.send_header("content-length", "0")
        self.end_headers()

    def _pass_on(self, reply: http.client.HTTPResponse, content: bytes, *, cut: bool) -> None:
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        if reply.getheader("content-length") is None and self.command != "HEAD":
            self.send_header("content-length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            cast("UnsteadyStore", self.server).sent += len(content)
            self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = cut or self.close_connection

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815 - names of http.server

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def unsteady_store() -> Iterator[UnsteadyStore]:
    """Run moto's S3 server with an empty bucket `bucket`, behind a proxy whose answers may fail."""
    if importlib.util.find_spec("moto") is None:
        require("moto", "a store for tests")
    # A process of its own: a test that forks keeps small, and the two compute at once.
    moto = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert moto.stdin is not None, "it has a pipe"  # noqa: S101 - for the type checker
    assert moto.stdout is not None, "it has a pipe"  # noqa: S101 - for the type checker
    port = int(moto.stdout.readline())
    to_bucket = http.client.HTTPConnection("127.0.0.1", port)
    to_bucket.request("PUT", "/bucket")
    to_bucket.getresponse().read()
    to_bucket.close()
    proxy = UnsteadyStore(port)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        moto.stdin.close()
        moto.wait()
        moto.stdout.close()
