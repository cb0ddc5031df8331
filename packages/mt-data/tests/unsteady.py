"""An object store for tests: moto's server on loopback, behind a proxy that fails requests."""

import contextlib
import http.client
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Unsteady(BaseHTTPRequestHandler):
    """Hands requests to a server; some are answered by an error, or cut short in the middle."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        server = self.server
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length) if length else None
        upstream = http.client.HTTPConnection("127.0.0.1", server.behind)
        upstream.request(self.command, self.path, body, dict(self.headers))
        reply = upstream.getresponse()
        content = reply.read()
        upstream.close()
        server.requests += 1
        fault = server.fault(self) if server.fault else None
        server.faults += fault is not None
        if fault == "error":
            self.send_response(503)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if fault == "cut" else content)
        if fault == "cut":
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = answer  # noqa: N815 - names of http.server

    def log_message(self, *_):
        return


@contextlib.contextmanager
def moto():
    """Run a server with a bucket named `bucket`; yields its port."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    to_bucket = http.client.HTTPConnection("127.0.0.1", port)
    to_bucket.request("PUT", "/bucket")
    to_bucket.getresponse().read()
    to_bucket.close()
    yield port
    server.stop()


@contextlib.contextmanager
def unsteady(behind):
    """Run a proxy before the server at a port; `fault` says of a request how it fails, if it does.

    The proxy counts its `requests`, and those of them that failed as `faults`.
    """
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Unsteady)
    proxy.daemon_threads = True
    proxy.behind, proxy.fault, proxy.requests, proxy.faults = behind, None, 0, 0
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    yield proxy
    proxy.shutdown()
    proxy.server_close()


def variables(proxy):
    """Return the variables by which a program finds the store behind a proxy."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


def failing(share, seed=0):
    """Return what lets a share of the requests fail."""
    draw = random.Random(seed)
    return lambda _: draw.choice(("error", "cut")) if draw.random() < share else None
