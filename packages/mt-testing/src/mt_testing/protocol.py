"""Messages between the pool and its ranks."""

from __future__ import annotations

from dataclasses import dataclass

FINISH = b""  # every rank has answered: the process group may go
NOTES_VARIABLE = "MT_TESTING_NOTES_FD"  # file descriptor that outlives the rank: last words


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call, as sent to every rank.

    Attributes:
        payload: The serialised function and arguments.
        store: Path of a `FileStore`. A `TCPStore` would look up the peer's name on every
            connection, which sometimes costs a DNS time-out of seconds.
        timeout: Timeout of the process group and its store, in seconds.
    """

    payload: bytes
    world_size: int
    backend: str
    store: str
    timeout: float
    environ: dict[str, str]
    directory: str
    sys_path: list[str]
