"""The client of other servers: what it sends, and what it makes of a server's answers."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from mt_infer.client import Client, ServerError, is_url

EVENT = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


@contextmanager
def serving(status, content, *, chunks=False):
    """A server with one answer; gives its address and the requests that it got."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            size = int(self.headers.get("Content-Length", 0))
            got.append((self.path, self.rfile.read(size), dict(self.headers)))
            self.send_response(status)
            if chunks:
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for piece in content:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    self.wfile.flush()
            else:
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(content)
            self.close_connection = True

        do_POST = do_GET  # noqa: N815 - the library's name

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", got
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_a_request_has_the_key_and_the_path(path):
    with serving(200, b'{"data": [{"id": "m"}, {"id": "n"}, 7]}') as (url, got):
        assert Client(url=url + path, key="secret").models() == ["m", "n"]
    assert got[0][0] == "/v1/models"
    assert got[0][2]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_come_from_chunks_of_any_size(size):
    content = b": a comment\n\nevent: x\n" + EVENT * 2 + EVENT.replace(b"\n", b"\r\n") + DONE
    pieces = [content[n : n + size] for n in range(0, len(content), size)] + [b""]
    with serving(200, pieces, chunks=True) as (url, got):
        events = list(Client(url=url).stream("/chat/completions", {"model": "m"}))
    assert [each["choices"][0]["delta"]["content"] for each in events] == ["a"] * 3
    assert got[0][0] == "/v1/chat/completions"
    assert json.loads(got[0][1]) == {"model": "m", "stream": True}


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (200, EVENT, "in the middle of the answer"),
        (200, b"data: {\n\n" + DONE, "the server's answer"),
        (200, b"data: [1]\n\n" + DONE, "no JSON object"),
        (200, EVENT + b'data: {"error": {"message": "too hot"}}\n\n', "too hot"),
        (400, b'{"error": {"message": "top_k: unknown"}}', "answers with 400: top_k: unknown"),
        (404, b"<html>not here", "answers with 404: .*not here"),
        (500, b"", "answers with 500"),
        (302, b"", "answers with 302"),
    ],
)
def test_what_a_server_may_do_is_one_error(status, content, message):
    with serving(status, content) as (url, _), pytest.raises(ServerError, match=message) as error:
        list(Client(url=url).stream("/completions", {}))
    assert error.value.status == (None if status == 200 else status)


def test_a_stream_may_end_without_its_last_line():
    last = EVENT.replace(b"}]}", b', "finish_reason": "stop"}]}')
    with serving(200, EVENT + last) as (url, _):
        assert len(list(Client(url=url).stream("/completions", {}))) == 2


def test_a_chunk_that_is_cut_is_an_error():
    with serving(200, [EVENT], chunks=True) as (url, _), pytest.raises(ServerError):
        list(Client(url=url).stream("/completions", {}))


@pytest.mark.parametrize("url", ["http://", "ftp://a", "http://a:99999", "a", "http://[::1"])
def test_an_address_is_checked(url):
    with pytest.raises(ValueError, match="no address of a server"):
        Client(url=url)


def test_a_folder_is_no_address():
    assert is_url("https://example.org/v1")
    assert not is_url("runs/quickstart")
