"""The limits of a server."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import Checks


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a server; it refuses requests beyond a limit, and serves the others.

    Attributes:
        max_queue: Largest number of continuations that wait for a place in a pass.
        max_queue_tokens: Largest number of tokens, of prompts and `max_tokens`, of all
            continuations that have not ended.
        max_body_bytes: Largest body of a request.
        max_prompt_bytes: Largest text of a prompt, before it is tokenised.
        max_depth: Deepest nesting of a body's lists and mappings.
        max_connections: Largest number of open connections.
        max_stream_bytes: Largest number of bytes of answers that wait for a slow reader.
        deadline_s: Seconds after which a request ends, complete or not.
        header_s: Seconds that a connection may take for a request's headers.
        body_s: Seconds that a request may take for its body.
        idle_s: Seconds that a connection may be idle between requests.
        send_s: Seconds that a reader may take nothing of an answer.
        drain_s: Seconds for the accepted requests after SIGTERM.
    """

    max_queue: int = 256
    max_queue_tokens: int = 1 << 20
    max_body_bytes: int = 8 << 20
    max_prompt_bytes: int = 1 << 20
    max_depth: int = 64
    max_connections: int = 1024
    max_stream_bytes: int = 1 << 20
    deadline_s: float = 600.0
    header_s: float = 10.0
    body_s: float = 30.0
    idle_s: float = 30.0
    send_s: float = 30.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(0, "max_queue", "drain_s")
        checks.at_least(1, "max_queue_tokens", "max_body_bytes", "max_prompt_bytes", "max_depth")
        checks.at_least(1, "max_connections", "max_stream_bytes")
        checks.above(0, "deadline_s", "header_s", "body_s", "idle_s", "send_s")
        checks.done()
