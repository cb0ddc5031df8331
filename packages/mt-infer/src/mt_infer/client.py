"""A client of servers with OpenAI's interface, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mt_files import FileError, UserError, parse_json, shorten

KEY_VARIABLE = "MT_INFER_API_KEY"  # of the environment
_MOST_BYTES = 1 << 24  # largest answer, or event of a stream
_USUAL_PORTS = {"http": 80, "https": 443}
_OK = 200


class ServerError(UserError):
    """A server does not answer, or answers with an error.

    Attributes:
        status: HTTP status; None if there was no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def is_url(text: str) -> bool:
    """Return whether a text is the address of a server and not a folder."""
    return text.startswith(("http://", "https://"))


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client of a server.

    Attributes:
        url: Address of the server, such as `http://127.0.0.1:8000`, with or without `/v1`.
        key: Key of the server; None for none.
        timeout_s: Seconds to wait for more of an answer.
    """

    url: str
    key: str | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_valid = parts.scheme in _USUAL_PORTS and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid:
            raise ValueError(
                f"{shorten(self.url)} is no address of a server; give one such as "
                "http://127.0.0.1:8000"
            )

    def models(self) -> list[str]:
        """Return the names of the served models.

        Raises:
            ServerError: There is no answer, or an error.
        """
        with self._asked("GET", "/models") as response:
            found = _parsed(response.read(_MOST_BYTES))
        listed = found.get("data")
        named = listed if isinstance(listed, list) else []
        return [str(each["id"]) for each in named if isinstance(each, dict) and "id" in each]

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a body, and yield the events of the answer as they come.

        Args:
            path: Path after `/v1`, such as `/chat/completions`.
            body: Fields of the request, to which `stream` is added.

        Raises:
            ServerError: There is no answer, or an error, also in the middle of the stream.
        """
        has_finished = False
        with self._asked("POST", path, {**body, "stream": True}) as response:
            while line := response.readline(_MOST_BYTES + 1):
                if len(line) > _MOST_BYTES:
                    raise ServerError(f"the server sent an event of more than {_MOST_BYTES} bytes")
                name, _, value = line.partition(b":")
                if name != b"data":
                    continue
                if value.strip() == b"[DONE]":
                    return
                event = _parsed(value)
                if event.get("error"):
                    raise ServerError(f"the server ended the answer: {_message(event)}")
                choices = event.get("choices") or []
                has_finished |= any(each.get("finish_reason") for each in choices)
                yield event
        if not has_finished:  # some servers send no [DONE]
            raise ServerError("the server closed the connection in the middle of the answer")

    @contextmanager
    def _asked(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request, and yield the response with status 200."""
        headers = {"Accept": "application/json, text/event-stream"}
        content = None
        if body is not None:
            content, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        connection, prefix = self._connection()
        try:
            connection.request(method, prefix + path, content, headers)
            with connection.getresponse() as response:
                if response.status != _OK:
                    raise self._refused(response)
                yield response
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"no answer from {self.url}: {reason}") from error
        finally:
            connection.close()

    def _connection(self) -> tuple[http.client.HTTPConnection, str]:
        parts = urlsplit(self.url)
        prefix = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        host, port = parts.hostname or "", parts.port or _USUAL_PORTS[parts.scheme]
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=self.timeout_s), prefix
        context = ssl.create_default_context()
        how = {"timeout": self.timeout_s, "context": context}
        return http.client.HTTPSConnection(host, port, **how), prefix

    def _refused(self, response: http.client.HTTPResponse) -> ServerError:
        content = response.read(_MOST_BYTES)
        try:
            message = _message(_parsed(content))
        except ServerError:
            message = shorten(content.decode(errors="replace"))
        where = f"{self.url} answers with {response.status}"
        return ServerError(f"{where}: {message}", response.status)


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        value = parse_json(content.strip(), name="the answer")
    except FileError as error:
        raise ServerError(f"the server's answer {error.problem}") from None
    if not isinstance(value, dict):
        raise ServerError(f"the server's answer is {shorten(value)}, and no JSON object")
    return value


def _message(answer: Mapping[str, Any]) -> str:
    error = answer.get("error", answer)
    said = error.get("message", error) if isinstance(error, dict) else error
    return str(said)[:2000]
