"""A server on loopback in a thread of the test, and requests to it."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer: its status, headers and body, which is read as JSON where it is JSON."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def body(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True, kw_only=True)
class Site:
    """An address on loopback."""

    port: int
    key: str | None = None

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send a request on a connection of its own, with the site's key."""
        if self.key is not None:
            headers.setdefault("Authorization", f"Bearer {self.key}")
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, raw, headers)
            found = connection.getresponse()
            given = {name.lower(): value for name, value in found.getheaders()}
            return Answer(status=found.status, headers=given, text=found.read().decode())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.ask("POST", path, body, **headers)


@contextmanager
def served(app: FastAPI, key: str | None = None) -> Iterator[Site]:
    """Serve an app in a thread while the block runs."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Site(port=server.servers[0].sockets[0].getsockname()[1], key=key)
    finally:
        server.should_exit = True
        thread.join()


def wait_for(is_true: Any, seconds: float = 20) -> None:
    """Wait until a function returns something true; fail after some seconds."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """Return the numbers of the processes that a process's main thread has started."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


class Process:
    """`mt-infer serve` of a run as a process, whose log is beside the run.

    Args:
        run: The run.
        options: Options of the command.
        key: Key of a client.
        admin: Key of an admin.
    """

    def __init__(
        self, run: Path, *options: str, key: str | None = None, admin: str | None = None
    ) -> None:
        self.log = run.parent / "log.jsonl"
        command = [sys.executable, "-m", "mt_infer", "serve", str(run), "--port=0", *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        with self.process.stdout as output:
            line = output.readline()
        found = re.fullmatch(r"listening on http://127.0.0.1:(\d+)\n", line)
        assert found, self.log.read_text()
        self.site = Site(port=int(found[1]), key=key)
        self.admin = Site(port=int(found[1]), key=admin)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def engines(self) -> list[int]:
        """Numbers of the engines' processes."""
        return children(self.process.pid)

    def complete(self, body: dict[str, Any]) -> Answer:
        """Send a request for a completion."""
        return self.site.post("/v1/completions", body)

    def metric(self, name: str) -> float:
        """Return a metric of the server."""
        found = re.search(rf"^mt:{name} (\S+)$", self.site.get("/metrics").text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def is_idle(self) -> bool:
        """Return whether no request runs or waits, and no block is used."""
        waiting = self.metric("num_requests_running") + self.metric("num_requests_waiting")
        return waiting == 0 and self.metric("kv_cache_usage_perc") == 0
